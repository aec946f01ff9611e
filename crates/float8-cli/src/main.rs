//! The program `float8`: see `--help`.

use std::process::ExitCode;

fn main() -> ExitCode {
    float8_cli::main(trainer::cli::parse)
}
