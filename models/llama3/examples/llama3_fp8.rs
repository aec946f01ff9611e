//! Trains a Llama 3 with FP8 linears: `cargo run --release --example llama3_fp8`, see `--help`.

use std::io;
use std::process::ExitCode;

use clap::Parser;
use llama3::cli::Args;

fn main() -> ExitCode {
    llama3_backends::main(|| {
        let out = &mut io::stdout();
        match Args::parse().job(out)? {
            Some(job) => llama3_backends::run(&job, out),
            None => Ok(()),
        }
    })
}
