//! Errors of a training run.

use std::path::PathBuf;

use burn_float8::{Float8Error, report::NonFiniteOperand};

use crate::config::ConfigError;
use crate::data::DataError;
use crate::metrics::MetricsError;
use crate::profile::ProfileError;
use crate::tokenizer::TokenizerError;

/// Error of a training run.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TrainError {
    /// Any other error, with its context.
    #[error(transparent)]
    Other(#[from] anyhow::Error),
    /// Invalid configuration.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The data cannot be read or has changed.
    #[error(transparent)]
    Data(#[from] DataError),
    /// A tokenizer cannot be read or does not accept a text.
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
    /// With `float8.strict`, a GEMM that should run in FP8 did not.
    #[error("float8.strict: {0}")]
    Strict(#[source] Float8Error),
    /// The device failed while computing.
    #[error("the device failed while {doing}: {reason}")]
    Execution {
        /// The operation that failed.
        doing: &'static str,
        /// The device's reason.
        reason: String,
    },
    /// Loss or gradients are no longer finite.
    #[error(transparent)]
    Diverged(Box<Divergence>),
    /// The trained model's held-out loss is not finite.
    #[error("training diverged: held-out loss = {loss} after {steps} steps")]
    HeldOutDiverged {
        /// Completed optimizer steps; 0 means that the initial parameters are at fault.
        steps: usize,
        /// The loss.
        loss: f64,
    },
    /// The run was stopped and has saved its state.
    #[error("stopped by {signal} after step {step}; `resume {}` goes on from there", folder.display())]
    Interrupted {
        /// Name of the signal, or a text about the unwritable log.
        signal: &'static str,
        /// Completed and saved steps.
        step: usize,
        /// The folder of checkpoints.
        folder: PathBuf,
    },
    /// The run was stopped and is not saved.
    #[error(
        "stopped by {signal} after step {step}; nothing of the run is saved: with --checkpoints FOLDER (checkpoint.folder) \
         it would be, and `resume` would go on with it"
    )]
    Stopped {
        /// Name of the signal, or a text about the unwritable log.
        signal: &'static str,
        /// Completed steps.
        step: usize,
    },
    /// The signal handlers could not be installed.
    #[error("cannot listen to signals")]
    Signals(#[source] std::io::Error),
    /// Communication between the ranks failed.
    #[error(transparent)]
    Ranks(#[from] float8_shard::CommError),
    /// The log could not be written.
    #[error("cannot write the log")]
    Output(#[from] std::io::Error),
}

/// Loss or gradients are no longer finite.
#[derive(Clone, Debug, thiserror::Error)]
#[error("training diverged at step {step}: loss = {loss:.5}, grad_norm = {grad_norm:.4}{}{}", first(cause.as_ref()), way_back(saved, folder.as_ref()))]
pub struct Divergence {
    /// Step, counted from 1.
    pub step: usize,
    /// Its loss.
    pub loss: f64,
    /// Its gradient norm.
    pub grad_norm: f64,
    /// First non-finite operand of an FP8 linear.
    pub cause: Option<NonFiniteOperand>,
    /// Steps of the checkpoints, in order. Their numbers are finite, but the model may already be
    /// damaged.
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
