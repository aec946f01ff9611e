//! Checks and measurements on a GPU, in one program that needs only the driver and NVRTC with its
//! headers.
//!
//! `float8-gpu check` compares every kernel and Float8 linears with the scalar reference.
//! `float8-gpu bench` measures them against the same work in high precision, and against torch if
//! installed. `float8-gpu versions` prints the device and software versions.
//!
//! Cases run in worker processes with time limits, so that a GPU fault or a hang costs one case.
//!
//! Exit codes:
//! - 0: success
//! - 1: a wrong result or an error
//! - 2: the device is absent
//! - 3: some cases did not run, and all others passed

mod bench;
mod check;
mod registers;
mod target;

use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context;
use clap::{Parser, Subcommand, ValueEnum};
use device_select::{DeviceChoice, SelectedDevice, cuda_setup, quiet_wayland, select};
use kernel_tests::Limits;

use target::{OnCuda, OnWgpu};

/// Checks FP8 on this machine's GPU and measures its speed.
#[derive(Parser)]
struct Args {
    /// Device to run on. wgpu is for trying the program without an NVIDIA GPU.
    #[arg(long, value_enum, default_value_t = Device::Cuda, global = true)]
    device: Device,
    /// Runs cases whose numbers are read from standard input. The program starts itself with this
    /// option.
    #[arg(long, global = true, hide = true)]
    worker: bool,
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
    /// Checks golden files, every kernel against the scalar reference, and Float8 linears against
    /// the CPU.
    Check(check::Args),
    /// Measures TFLOP/s, bandwidths and train steps, as ratios to high precision in the same run.
    Bench(bench::Args),
    /// Prints the device, its driver and NVRTC, and the registers of the GEMMs.
    Versions,
}

/// Outcome of a command.
enum Outcome {
    Right,
    /// No result is wrong, but time ran out or torch failed.
    Incomplete,
    Wrong,
}

impl Outcome {
    fn of(wrong: bool, complete: bool) -> Self {
        match (wrong, complete) {
            (true, _) => Self::Wrong,
            (false, true) => Self::Right,
            (false, false) => Self::Incomplete,
        }
    }
}

/// Time limits of a run.
#[derive(Clone, Copy, clap::Args)]
struct LimitArgs {
    /// Seconds for the whole run; later cases are skipped.
    #[arg(long, default_value_t = 540)]
    limit_seconds: u64,
    /// Seconds for one case, compiling its kernels included.
    #[arg(long, default_value_t = 90, overrides_with = "case_seconds")]
    case_seconds: u64,
}

impl LimitArgs {
    fn of(self, jobs: usize) -> Limits {
        let [all, case] = [self.limit_seconds, self.case_seconds].map(Duration::from_secs);
        Limits { all, case, jobs }
    }
}

/// Command that starts this program as a worker, with the same arguments.
fn worker() -> std::process::Command {
    let mut command = std::process::Command::new(std::env::current_exe().unwrap_or_else(|_| "float8-gpu".into()));
    command.args(std::env::args_os().skip(1)).arg("--worker");
    command
}

fn main() -> ExitCode {
    // SAFETY: a program starts with one thread.
    unsafe {
        quiet_wayland();
        // Checks should find errors, not avoid them.
        if std::env::var_os("FLOAT8_SELF_CHECK").is_none() {
            std::env::set_var("FLOAT8_SELF_CHECK", "off");
        }
    }
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
    let on_cuda = selected == SelectedDevice::Cuda;
    if args.worker {
        match (&args.command, on_cuda) {
            (Command::Check(args), true) => check::serve::<OnCuda>(args),
            (Command::Check(args), false) => check::serve::<OnWgpu>(args),
            (Command::Bench(args), true) => bench::serve::<OnCuda>(args),
            (Command::Bench(args), false) => bench::serve::<OnWgpu>(args),
            (Command::Versions, _) => {}
        }
        return ExitCode::SUCCESS;
    }
    println!("device: {selected}");
    let done = match &args.command {
        Command::Check(args) => check::run(args),
        Command::Bench(args) => bench::run(args),
        Command::Versions => {
            let mut compiles = false;
            if on_cuda && let Ok(setup) = cuda_setup() {
                let nvrtc = setup.nvrtc.map_or_else(|| "none, only compiled kernels".into(), |nvrtc| nvrtc.to_string());
                println!("driver: CUDA {}; NVRTC {nvrtc}; {} devices", setup.driver, setup.devices);
                compiles = setup.nvrtc.is_some();
            }
            let registers = if compiles { registers::print() } else { Ok(()) };
            registers.map(|()| Outcome::Right).context("registers of the GEMMs")
        }
    };
    match done {
        Ok(Outcome::Right) => ExitCode::SUCCESS,
        Ok(Outcome::Incomplete) => ExitCode::from(3),
        Ok(Outcome::Wrong) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}
