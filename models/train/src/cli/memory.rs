//! `memory`: what a training step would take.

use std::num::NonZero;
use std::path::PathBuf;

use burn_float8::Recipe;
use clap::Parser;
use device_select::DeviceChoice;

use super::{Args, recipe};
use crate::JobError;
use crate::config::Precision;
use crate::job::{Job, Start, Task};
use crate::model::TrainableModel;

/// Print the memory that a training step takes, by what takes it and when in the step. Nothing of it is allocated, and the device need
/// not be there.
///
/// Ends with 1, and settings that fit, if the device has less.
#[derive(Clone, Debug, Parser)]
pub struct MemoryArgs {
    /// TOML file; configs/ has examples.
    #[arg(value_name = "CONFIG")]
    pub config: Option<PathBuf>,
    /// auto, cuda, wgpu or cpu.
    #[arg(long)]
    pub device: Option<DeviceChoice>,
    /// Precision of linears.
    #[arg(long, value_enum)]
    pub precision: Option<Precision>,
    /// How FP8 operands are scaled.
    #[arg(long, value_parser = recipe())]
    pub recipe: Option<Recipe>,
    /// Override a key of the config; repeatable.
    #[arg(long, value_name = "SECTION.KEY=VALUE")]
    pub set: Vec<String>,
    /// Processes that share the model.
    #[arg(long, value_name = "N", default_value = "1")]
    pub ranks: NonZero<usize>,
    /// GiB that the device has; those of this machine for the CPU, and unknown for others, if absent.
    #[arg(long, value_name = "GIB")]
    pub available: Option<f64>,
}

impl MemoryArgs {
    /// What to do.
    ///
    /// # Errors
    /// The errors of [`Args::run_config`].
    pub fn job<A: TrainableModel>(&self) -> Result<Job<A>, JobError> {
        let Self { config, device, precision, recipe, set, .. } = self.clone();
        let config = Args { config, device, precision, recipe, set, ..Args::default() }.run_config()?;
        let available = self.available.map(|gib| (gib * f64::from(1 << 30)) as u64);
        Ok(Job { config, start: Start::default(), task: Task::Memory { ranks: self.ranks.get(), available } })
    }
}
