//! `memory`: estimates the memory of a training step.

use std::num::NonZero;
use std::path::PathBuf;

use clap::Parser;

use super::{Args, Overrides};
use crate::config::require;
use crate::job::{Job, Start, Task};
use crate::model::TrainableModel;

/// Print the memory of a training step, by part and by moment. Nothing is allocated, and the device
/// need not exist.
///
/// Exits with 1 if the device has less.
#[derive(Clone, Debug, Parser)]
pub struct MemoryArgs {
    /// TOML file; configs/ has examples.
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Overrides of the file.
    #[command(flatten)]
    pub overrides: Overrides,
    /// Folder of a Hugging Face checkpoint, or a preset.
    #[arg(long, value_name = "MODEL")]
    pub model: Option<String>,
    /// Number of processes that share the model.
    #[arg(long, value_name = "N", default_value = "1")]
    pub ranks: NonZero<usize>,
    /// GiB of the device. If absent, CUDA reports it, and a CPU has this machine's memory; unknown
    /// for GPUs through wgpu.
    #[arg(long, value_name = "GIB", allow_negative_numbers = true)]
    pub memory_gib: Option<f64>,
}

impl MemoryArgs {
    /// Job of the command.
    ///
    /// # Errors
    /// The errors of [`Args::run_config`];
    /// [`ConfigError::Value`](crate::config::ConfigError::Value) for an invalid amount of memory.
    pub fn job<A: TrainableModel>(&self) -> anyhow::Result<Job<A>> {
        let Self { config, overrides, model, .. } = self.clone();
        let config = Args { config, overrides, model, ..Args::default() }.run_config()?;
        if let Some(gib) = self.memory_gib {
            require("--memory-gib", gib, gib > 0.0 && gib.is_finite(), "must be positive and finite: so many GiB")?;
        }
        let available = self.memory_gib.map(|gib| (gib * f64::from(1 << 30)) as u64);
        Ok(Job { config, start: Start::default(), task: Task::Memory { ranks: self.ranks.get(), available } })
    }
}
