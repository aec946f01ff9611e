//! The program `llama3`: see `--help`.

use std::process::ExitCode;

use clap::Parser;
use llama3::cli::Command;

fn main() -> ExitCode {
    llama3_backends::main(|| llama3_backends::start(|out| Command::parse().job(out)))
}
