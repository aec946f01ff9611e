//! What `train` and `resume` have in common.

use std::io::Write;
use std::num::NonZero;
use std::path::PathBuf;

use clap::Parser;

use crate::JobError;
use crate::config::StepCount;
use crate::job::{RunConfig, Task};
use crate::model::ModelSection;

/// How long a run is, and what is said about it.
#[derive(Clone, Debug, Default, Parser)]
pub struct RunFlags {
    /// Optimizer steps in all, or passes over the data, as in "3 epochs".
    #[arg(long, value_name = "N")]
    pub steps: Option<StepCount>,
    /// Write what each linear did, GEMM by GEMM, as JSON.
    #[arg(long, value_name = "FILE")]
    pub report: Option<PathBuf>,
    /// Print it as a table at the end.
    #[arg(long)]
    pub print_report: bool,
    /// Print the configuration with all its defaults, and end.
    #[arg(long)]
    pub print_config: bool,
    /// Train on so many processes of this machine, which `mpirun` starts, each with a part of the model; needs the feature `mpi`.
    #[arg(long, value_name = "N")]
    pub nproc: Option<NonZero<usize>>,
    /// Print the memory that each of so many processes would take, and end.
    #[arg(long, value_name = "N", conflicts_with = "nproc")]
    pub ranks: Option<NonZero<usize>>,
}

impl RunFlags {
    pub(super) fn apply<S>(&self, config: &mut RunConfig<S>) {
        let training = &mut config.training;
        training.steps = self.steps.unwrap_or(training.steps);
        training.report = self.report.clone().or(training.report.take());
        training.print_report |= self.print_report;
    }

    /// Whether the configuration was to be printed, which it has been then.
    pub(super) fn print<S: ModelSection>(&self, config: &RunConfig<S>, out: &mut dyn Write) -> Result<bool, JobError> {
        if self.print_config {
            write!(out, "{}", config.to_toml()?)?;
        }
        Ok(self.print_config)
    }

    /// What is to be done with the run.
    pub(super) fn task(&self) -> Task {
        self.ranks.map_or(Task::Train, |ranks| Task::Memory { ranks: ranks.get(), available: None })
    }
}
