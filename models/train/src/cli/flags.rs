//! Flags shared by `train` and `resume`.

use std::io::Write;
use std::num::NonZero;
use std::path::PathBuf;

use clap::Parser;

use crate::JobError;
use crate::config::StepCount;
use crate::job::{RunConfig, Task};
use crate::model::ModelSection;

/// Length and reports of a run.
#[derive(Clone, Debug, Default, Parser)]
pub struct RunFlags {
    /// Number of optimizer steps, or of passes over the data, as in "3 epochs".
    #[arg(long, value_name = "N")]
    pub steps: Option<StepCount>,
    /// Write a JSON report of each linear's GEMMs.
    #[arg(long, value_name = "FILE")]
    pub report: Option<PathBuf>,
    /// Print this report as a table at the end.
    #[arg(long)]
    pub print_report: bool,
    /// Print the configuration with all defaults, and exit.
    #[arg(long)]
    pub print_config: bool,
    /// Train on N processes of this machine, each with a part of the model. `mpirun` starts them;
    /// needs the feature `mpi`.
    #[arg(long, value_name = "N")]
    pub nproc: Option<NonZero<usize>>,
    /// Print the memory that each of N processes would use, and exit.
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

    /// Prints the configuration if requested. Returns whether it did.
    pub(super) fn print<S: ModelSection>(&self, config: &RunConfig<S>, out: &mut dyn Write) -> Result<bool, JobError> {
        if self.print_config {
            write!(out, "{}", config.to_toml()?)?;
        }
        Ok(self.print_config)
    }

    /// Task of the command.
    pub(super) fn task(&self) -> Task {
        self.ranks.map_or(Task::Train, |ranks| Task::Memory { ranks: ranks.get(), available: None })
    }
}
