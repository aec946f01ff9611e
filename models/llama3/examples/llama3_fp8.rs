//! Trains a Llama 3 with FP8 linears: `cargo run --release --example llama3_fp8`, see `--help`.

use std::error::Error as _;
use std::io::{self, Write};
use std::process::ExitCode;

use clap::Parser;
use device_select::{SelectedDevice, select};
use llama3::Error;
use llama3::cli::Args;
use llama3_backends::{on_cpu, on_cuda, on_wgpu};

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            let mut source = error.source();
            while let Some(cause) = source {
                eprintln!("  caused by: {cause}");
                source = cause.source();
            }
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<(), Error> {
    let config = Args::parse().run_config()?;
    // What burn-float8 says during a run: layers that statistics have moved.
    let mut logger = env_logger::builder();
    logger.format(|line, record| writeln!(line, "{}", record.args())).parse_default_env().init();
    let selected = select(config.training.device)?;
    let train = match selected {
        SelectedDevice::Cpu => on_cpu,
        SelectedDevice::Wgpu(_) => on_wgpu,
        SelectedDevice::Cuda => on_cuda,
    };
    train(&selected, &config, &mut io::stdout())
}
