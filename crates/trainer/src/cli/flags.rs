//! Flags shared by `train` and `resume`.

use std::num::NonZero;
use std::path::PathBuf;

use clap::Parser;

use crate::config::{NoLength, StepCount};
use crate::job::RunConfig;

/// Length and reports of a run.
#[derive(Clone, Debug, Default, Parser)]
pub struct RunFlags {
    /// Number of optimizer steps, or of passes over the data, as in "3 epochs". If absent,
    /// training.steps, 600 by default.
    #[arg(long, value_name = "N")]
    pub steps: Option<StepCount>,
    /// Number of passes over the data.
    #[arg(long, value_name = "N", conflicts_with = "steps", value_parser = epochs)]
    pub epochs: Option<StepCount>,
    /// Report each linear's GEMMs: as a table at the end, or as JSON in a file.
    #[arg(long, value_name = "FILE", num_args = 0..=1, require_equals = true)]
    pub fp8_report: Option<Option<PathBuf>>,
    /// Train on N processes of this machine, each with a part of the model. `mpirun` starts them;
    /// needs the feature `mpi`.
    #[arg(long, value_name = "N")]
    pub nproc_per_node: Option<NonZero<usize>>,
}

impl RunFlags {
    pub(super) fn apply<S>(&self, config: &mut RunConfig<S>) {
        let training = &mut config.training;
        training.steps = self.steps.or(self.epochs).unwrap_or(training.steps);
        config.fp8_report.clone_from(&self.fp8_report);
    }
}

/// Parses a number of epochs.
fn epochs(text: &str) -> Result<StepCount, NoLength> {
    format!("{text} epochs").parse()
}
