//! The program `llama3`: see `--help`.

use std::io;
use std::process::ExitCode;

use clap::Parser;
use llama3::cli::Command;

fn main() -> ExitCode {
    llama3_backends::main(|| {
        let out = &mut io::stdout();
        match Command::parse().job(out)? {
            Some(job) => llama3_backends::run(&job, out),
            None => Ok(()),
        }
    })
}
