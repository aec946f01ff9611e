//! The command line of `examples/llama3_fp8.rs`.

use std::path::PathBuf;

use burn_float8::device::DeviceChoice;
use clap::{Parser, ValueEnum};

use crate::Error;
use crate::run_config::{Precision, RunConfig};

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
}
