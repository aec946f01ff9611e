//! The program `llama3`: see `--help`.

use std::process::ExitCode;

use clap::Parser;
use llama3::cli::Command;

fn main() -> ExitCode {
    llama3_backends::main(|| {
        let command = Command::parse();
        llama3_backends::start(command.trains(), command.nproc(), |out| command.job(out))
    })
}
