//! [`llama3::trainer::train`] on each of Burn's backends: all that generic code, compiled for them.
//!
//! A library is compiled as soon as the declarations of what it uses are known, so beside burn-flex; a program waits for
//! all their code. One library for all: the GPU backends share a lot of it, which two would compile twice.

use std::error::Error as _;
use std::io::Write;
use std::process::ExitCode;

use device_select::{SelectedDevice, select};
use llama3::cli::Args;
use llama3::{Error, RunConfig};

/// Runs a program: what burn-float8 logs goes to the terminal, and so does an error with all its causes.
pub fn main(run: impl FnOnce() -> Result<(), Error>) -> ExitCode {
    let mut logger = env_logger::builder();
    logger.format(|line, record| writeln!(line, "{}", record.args())).parse_default_env().init();
    let Err(error) = run() else { return ExitCode::SUCCESS };
    eprintln!("error: {error}");
    let mut source = error.source();
    while let Some(cause) = source {
        eprintln!("  caused by: {cause}");
        source = cause.source();
    }
    ExitCode::FAILURE
}

/// Trains as the arguments say, on the device that they choose, and writes the log to `out`; or prints the configuration.
///
/// # Errors
/// Any [`Error`].
pub fn train(args: &Args, out: &mut dyn Write) -> Result<(), Error> {
    let config = args.run_config()?;
    if args.print_config {
        return Ok(write!(out, "{}", config.to_toml()?)?);
    }
    let selected = select(config.training.device)?;
    let train = match selected {
        SelectedDevice::Cpu => on_cpu,
        SelectedDevice::Wgpu(_) => on_wgpu,
        SelectedDevice::Cuda => on_cuda,
    };
    train(&selected, &config, out)
}

macro_rules! backend {
    ($function:ident, $backend:ident, $device:literal, $feature:literal) => {
        /// Trains as `config` says on the default device of this backend, which is `selected`, and writes the log to `out`.
        ///
        /// # Errors
        /// Any [`Error`]; [`Error::FeatureOff`] where the backend is not compiled.
        #[cfg(feature = $feature)]
        pub fn $function(selected: &SelectedDevice, config: &RunConfig, out: &mut dyn Write) -> Result<(), Error> {
            type Decorated = burn::backend::Autodiff<burn_float8::Float8<burn::backend::$backend>>;
            llama3::trainer::train::<Decorated>(config, selected, &Default::default(), out).map(|_| ())
        }

        /// Is [`Error::FeatureOff`]: the backend is not compiled.
        ///
        /// # Errors
        /// Always.
        #[cfg(not(feature = $feature))]
        pub fn $function(_: &SelectedDevice, _: &RunConfig, _: &mut dyn Write) -> Result<(), Error> {
            Err(Error::FeatureOff { device: $device, feature: $feature })
        }
    };
}

backend!(on_cpu, Flex, "cpu", "flex");
backend!(on_wgpu, Wgpu, "wgpu", "wgpu");
backend!(on_cuda, Cuda, "cuda", "cuda");
