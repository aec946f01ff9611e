//! The program `llama3`: see `--help`.

use std::process::ExitCode;

use llama3::Llama3;
use train::cli;

fn main() -> ExitCode {
    llama3_backends::main(|| {
        let command = cli::parse::<Llama3>();
        llama3_backends::start(command.trains(), command.nproc(), |out| command.job(out))
    })
}
