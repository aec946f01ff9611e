//! Trains a Llama 3 with FP8 linears: `cargo run --release --example llama3_fp8`, see `--help`.

use std::process::ExitCode;

use clap::Parser;
use llama3::cli::Args;

fn main() -> ExitCode {
    llama3_backends::main(|| {
        let args = Args::parse();
        llama3_backends::start(true, args.flags.nproc, |out| args.job(out))
    })
}
