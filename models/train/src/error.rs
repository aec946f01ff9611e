//! What can go wrong in a run.

use std::path::PathBuf;

use burn_float8::{Float8Error, report::NonFiniteOperand};

use crate::checkpoint::CheckpointError;
use crate::config::ConfigError;
use crate::data::DataError;
use crate::metrics::MetricsError;
use crate::profile::ProfileError;
use crate::tokenizer::TokenizerError;

/// What can go wrong in a run.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TrainError {
    /// The configuration is not one.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// A checkpoint could not be written or read.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// The data cannot be read, or is not what it was.
    #[error(transparent)]
    Data(#[from] DataError),
    /// A tokenizer that cannot be read, or does not take a text.
    #[error(transparent)]
    Tokenizer(#[from] TokenizerError),
    /// A run's metrics cannot be read.
    #[error(transparent)]
    Metrics(#[from] MetricsError),
    /// A file could not be written.
    #[error("cannot write {}", path.display())]
    Write {
        /// The file.
        path: PathBuf,
        /// The system's reason.
        source: std::io::Error,
    },
    /// Steps could not be profiled.
    #[error(transparent)]
    Profile(#[from] ProfileError),
    /// FP8 could not be applied.
    #[error(transparent)]
    Float8(#[from] Float8Error),
    /// Not all that was to run in FP8 did, and `float8.strict` is set.
    #[error("float8.strict: {0}")]
    Strict(#[source] Float8Error),
    /// The device failed while computing.
    #[error("the device failed while {doing}: {reason}")]
    Execution {
        /// What was being read.
        doing: &'static str,
        /// The device's reason.
        reason: String,
    },
    /// Training left the finite numbers.
    #[error(transparent)]
    Diverged(Box<Divergence>),
    /// The trained model's held-out loss is not finite.
    #[error("training diverged: held-out loss = {loss} after {steps} steps")]
    HeldOutDiverged {
        /// Optimizer steps that were made; 0 if the initial parameters are to blame.
        steps: usize,
        /// The loss.
        loss: f64,
    },
    /// The run was told to stop, and has saved where it is.
    #[error("stopped by {signal} after step {step}; `resume {}` goes on from there", folder.display())]
    Interrupted {
        /// Its name, or that the log cannot be written.
        signal: &'static str,
        /// Steps made and saved.
        step: usize,
        /// The folder of checkpoints.
        folder: PathBuf,
    },
    /// The run was told to stop, and is not saved.
    #[error(
        "stopped by {signal} after step {step}; nothing of the run is saved: with --checkpoints FOLDER (checkpoint.folder) \
         it would be, and `resume` would go on with it"
    )]
    Stopped {
        /// Its name, or that the log cannot be written.
        signal: &'static str,
        /// Steps made.
        step: usize,
    },
    /// The system did not let signals be received.
    #[error("cannot listen to signals")]
    Signals(#[source] std::io::Error),
    /// The ranks of a sharded run could not work together.
    #[error(transparent)]
    Ranks(#[from] float8_shard::CommError),
    /// The log could not be written.
    #[error("cannot write the log")]
    Output(#[from] std::io::Error),
}

/// Training left the finite numbers.
#[derive(Clone, Debug, thiserror::Error)]
#[error("training diverged at step {step}: loss = {loss:.5}, grad_norm = {grad_norm:.4}{}{}", first(cause.as_ref()), way_back(saved, folder.as_ref()))]
pub struct Divergence {
    /// The step, from 1.
    pub step: usize,
    /// Its loss.
    pub loss: f64,
    /// Its gradient norm.
    pub grad_norm: f64,
    /// The first operand of an FP8 linear that was not finite.
    pub cause: Option<NonFiniteOperand>,
    /// Steps of the checkpoints, in order. Their numbers are finite, which is not to say that they are good.
    pub saved: Vec<u64>,
    /// The folder of the checkpoints.
    pub folder: Option<PathBuf>,
}

fn first(cause: Option<&NonFiniteOperand>) -> String {
    cause.map_or_else(String::new, |cause| format!("; the first non-finite operand: {cause}"))
}

fn way_back(saved: &[u64], folder: Option<&PathBuf>) -> String {
    let ([_, ..], Some(folder)) = (saved, folder) else { return String::new() };
    let steps: Vec<_> = saved.iter().map(u64::to_string).collect();
    format!(
        "; checkpoints with finite numbers: step {}; `resume {} --step N` goes on from one, and may lower optimizer.lr or change \
         float8.schedule",
        steps.join(", "),
        folder.display()
    )
}
