//! The command line, and the one place that picks a backend type for a device.

use std::io::{self, Write};
use std::path::PathBuf;

use burn_float8::device::{self, DeviceChoice, SelectedDevice};
use clap::{Parser, ValueEnum};

use crate::Error;
use crate::run_config::{Precision, RunConfig};
use crate::trainer::Outcome;

/// Train a Llama 3 with FP8 linears on text files.
///
/// Later wins: defaults, --config, --set in order, the other flags.
#[derive(Clone, Debug, Default, Parser)]
#[command(name = "llama3_fp8")]
pub struct Args {
    /// auto, cuda, wgpu or cpu; auto takes CUDA, else a hardware wgpu adapter, else the CPU.
    #[arg(long)]
    pub device: Option<DeviceChoice>,
    /// Precision of linears.
    #[arg(long)]
    pub precision: Option<Precision>,
    /// TOML file; configs/ has examples.
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Override a key of the config; repeatable.
    #[arg(long, value_name = "SECTION.KEY=VALUE")]
    pub set: Vec<String>,
    /// File or folder of text to train on instead of the local Cargo registry; repeatable.
    #[arg(long, value_name = "PATH")]
    pub data: Vec<PathBuf>,
    /// Optimizer steps.
    #[arg(long, value_name = "N")]
    pub steps: Option<usize>,
    /// Decides weights, batches and sample.
    #[arg(long, value_name = "N")]
    pub seed: Option<u64>,
}

impl ValueEnum for Precision {
    fn value_variants<'a>() -> &'a [Self] {
        &[Self::F32, Self::Bf16, Self::Fp8]
    }

    fn to_possible_value(&self) -> Option<clap::builder::PossibleValue> {
        let (name, help) = match self {
            Self::F32 => ("f32", "everything in f32"),
            Self::Bf16 => ("bf16", "hidden states and GEMMs in bf16"),
            Self::Fp8 => ("fp8", "GEMMs of linears in FP8"),
        };
        Some(clap::builder::PossibleValue::new(name).help(help))
    }
}

impl Args {
    /// The run that these arguments ask for, validated.
    ///
    /// # Errors
    /// Those of [`RunConfig::load`] and [`RunConfig::validate`].
    pub fn run_config(&self) -> Result<RunConfig, Error> {
        let mut config = RunConfig::load(self.config.as_deref(), &self.set)?;
        let training = &mut config.training;
        training.device = self.device.unwrap_or(training.device);
        training.precision = self.precision.unwrap_or(training.precision);
        training.steps = self.steps.unwrap_or(training.steps);
        training.seed = self.seed.unwrap_or(training.seed);
        if !self.data.is_empty() {
            config.data.paths = self.data.clone();
        }
        config.validate()?;
        Ok(config)
    }

    /// Trains, logging to standard output.
    ///
    /// # Errors
    /// Any [`Error`].
    pub fn run(&self) -> Result<Outcome, Error> {
        let config = self.run_config()?;
        let selected = device::select(config.training.device)?;
        run_on(&selected, &config, &mut io::stdout())
    }
}

/// Trains with the backend that belongs to `selected`, on its default device.
///
/// # Errors
/// [`Error::FeatureOff`] if that backend is not in this build; any other [`Error`] of the run.
pub fn run_on(selected: &SelectedDevice, config: &RunConfig, out: &mut dyn Write) -> Result<Outcome, Error> {
    match selected {
        SelectedDevice::Cpu => on_cpu(selected, config, out),
        SelectedDevice::Wgpu(_) => on_wgpu(selected, config, out),
        SelectedDevice::Cuda => on_cuda(selected, config, out),
    }
}

macro_rules! backend {
    ($function:ident, $backend:ident, $device:literal, $feature:literal) => {
        #[cfg(feature = $feature)]
        fn $function(selected: &SelectedDevice, config: &RunConfig, out: &mut dyn Write) -> Result<Outcome, Error> {
            type Decorated = burn::backend::Autodiff<burn_float8::Float8<burn::backend::$backend>>;
            crate::trainer::train::<Decorated>(config, selected, &Default::default(), out)
        }

        #[cfg(not(feature = $feature))]
        fn $function(_: &SelectedDevice, _: &RunConfig, _: &mut dyn Write) -> Result<Outcome, Error> {
            Err(Error::FeatureOff { device: $device, feature: $feature })
        }
    };
}

backend!(on_cpu, Flex, "cpu", "flex");
backend!(on_wgpu, Wgpu, "wgpu", "wgpu");
backend!(on_cuda, Cuda, "cuda", "cuda");
