//! Trains a Qwen3 with FP8 linears: `cargo run --release --example qwen3_fp8`, see `--help`. It
//! also resumes, evaluates, generates and exports:
//! `cargo run --release --example qwen3_fp8 -- export RUN FOLDER`.

use std::process::ExitCode;

use qwen3::Qwen3Model;
use train::cli;
use train_backends::{run, start};

fn main() -> ExitCode {
    train_backends::main(|| {
        let command = cli::parse_example::<Qwen3Model>("qwen3_fp8");
        start(command.trains(), command.nproc(), |out| command.job(out), run::<Qwen3Model>)
    })
}
