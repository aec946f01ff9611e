//! Trains a Llama 3 with FP8 linears: `cargo run --release --example llama3_fp8`, see `--help`.

use std::error::Error;
use std::process::ExitCode;

use clap::Parser;
use llama3::cli::Args;

fn main() -> ExitCode {
    match Args::parse().run() {
        Ok(_) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            let mut source = error.source();
            while let Some(cause) = source {
                eprintln!("  caused by: {cause}");
                source = cause.source();
            }
            ExitCode::FAILURE
        }
    }
}
