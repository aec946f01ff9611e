//! Trains a small Llama 3 with FP8 linears on the Cargo registry:
//! `cargo run --release --example llama3_fp8`. It has all commands of `float8`, see `--help`.

use std::process::ExitCode;

fn main() -> ExitCode {
    float8_cli::main(|| trainer::cli::parse_example("llama3_fp8"))
}
