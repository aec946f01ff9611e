//! Checks and measurements on a GPU, in one program that needs nothing beside it but the driver and NVRTC with its headers.
//!
//! `float8-gpu check` compares every kernel and Float8 linears with the scalar reference; `float8-gpu bench` measures them
//! against the same work in high precision, and against torch where it is installed. Exit codes: 0, 1 if something is wrong,
//! 2 if the device is absent.

mod bench;
mod check;
mod target;

use std::process::ExitCode;

use clap::{Parser, Subcommand, ValueEnum};
use device_select::{DeviceChoice, SelectedDevice, select};

use target::{OnCuda, OnWgpu};

/// FP8 on this machine's GPU: is it right, and how fast is it?
#[derive(Parser)]
struct Args {
    /// Where to run; wgpu is there to try the program without an NVIDIA GPU.
    #[arg(long, value_enum, default_value_t = Device::Cuda, global = true)]
    device: Device,
    #[command(subcommand)]
    command: Command,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Device {
    Cuda,
    Wgpu,
}

#[derive(Subcommand)]
enum Command {
    /// Golden files, every kernel against the scalar reference, and Float8 linears against the CPU's.
    Check(check::Args),
    /// TFLOP/s, bandwidths and train steps, as ratios to high precision in the same run.
    Bench(bench::Args),
}

/// What can stop the program.
#[derive(Debug, thiserror::Error)]
enum Error {
    /// The device cannot be used.
    #[error(transparent)]
    Device(#[from] device_select::DeviceError),
    /// A file could not be written or a program not be run.
    #[error("{what}: {source}")]
    Io { what: String, source: std::io::Error },
    /// Results that are no JSON.
    #[error("{what}: {source}")]
    Json { what: &'static str, source: serde_json::Error },
    /// The library refused.
    #[error(transparent)]
    Kernel(#[from] float8_kernels::KernelError),
    /// A configuration was refused.
    #[error(transparent)]
    Float8(#[from] burn_float8::Float8Error),
    /// A model was refused.
    #[error(transparent)]
    Llama(#[from] llama3::Error),
    /// The torch script failed.
    #[error("torch baseline: {0}")]
    Torch(String),
}

fn main() -> ExitCode {
    let args = Args::parse();
    let choice = match args.device {
        Device::Cuda => DeviceChoice::Cuda,
        Device::Wgpu => DeviceChoice::Wgpu,
    };
    let selected = match select(choice) {
        Ok(selected) => selected,
        Err(error) => {
            eprintln!("error: {error}");
            return ExitCode::from(2);
        }
    };
    println!("device: {selected}");
    let done = match (&args.command, selected) {
        (Command::Check(args), SelectedDevice::Cuda) => check::run::<OnCuda>(args),
        (Command::Check(args), _) => check::run::<OnWgpu>(args),
        (Command::Bench(args), SelectedDevice::Cuda) => bench::run::<OnCuda>(args),
        (Command::Bench(args), _) => bench::run::<OnWgpu>(args),
    };
    match done {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}
