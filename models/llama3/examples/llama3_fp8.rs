//! Trains a Llama 3 with FP8 linears: `cargo run --release --example llama3_fp8`, see `--help`.

use std::process::ExitCode;

use llama3::Llama3;
use train::cli;

fn main() -> ExitCode {
    llama3_backends::main(|| {
        let command = cli::parse_example::<Llama3>("llama3_fp8");
        llama3_backends::start(command.trains(), command.nproc(), |out| command.job(out))
    })
}
