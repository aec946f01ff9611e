//! Trains a Llama 3 with FP8 linears: `cargo run --release --example llama3_fp8`, see `--help`.

use std::error::Error as _;
use std::io::{self, Write};
use std::process::ExitCode;

use device_select::{SelectedDevice, select};
use clap::Parser;
use llama3::cli::Args;
use llama3::{Error, RunConfig};

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
    let selected = select(config.training.device)?;
    let train = match selected {
        SelectedDevice::Cpu => on_cpu,
        SelectedDevice::Wgpu(_) => on_wgpu,
        SelectedDevice::Cuda => on_cuda,
    };
    train(&selected, &config, &mut io::stdout())
}

// Here and not in the library: each backend is compiled once, and only by who trains on it.
macro_rules! backend {
    ($function:ident, $backend:ident, $device:literal, $feature:literal) => {
        #[cfg(feature = $feature)]
        fn $function(selected: &SelectedDevice, config: &RunConfig, out: &mut dyn Write) -> Result<(), Error> {
            type Decorated = burn::backend::Autodiff<burn_float8::Float8<burn::backend::$backend>>;
            llama3::trainer::train::<Decorated>(config, selected, &Default::default(), out).map(|_| ())
        }

        #[cfg(not(feature = $feature))]
        fn $function(_: &SelectedDevice, _: &RunConfig, _: &mut dyn Write) -> Result<(), Error> {
            Err(Error::FeatureOff { device: $device, feature: $feature })
        }
    };
}

backend!(on_cpu, Flex, "cpu", "flex");
backend!(on_wgpu, Wgpu, "wgpu", "wgpu");
backend!(on_cuda, Cuda, "cuda", "cuda");
