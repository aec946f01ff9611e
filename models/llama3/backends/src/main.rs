//! The program `llama3`: see `--help`.

use std::io;
use std::process::ExitCode;

use clap::Parser;
use llama3::cli::Command;

fn main() -> ExitCode {
    llama3_backends::main(|| match Command::parse() {
        Command::Train(args) => llama3_backends::train(&args, &mut io::stdout()),
        Command::Tokenize(args) => args.run(&mut io::BufWriter::new(io::stdout())),
    })
}
