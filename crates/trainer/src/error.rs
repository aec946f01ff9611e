//! [`RunError`]: causes by which a caller decides. Others are [`anyhow::Error`]s with contexts.

use std::fmt::Display;
use std::path::{Path, PathBuf};

use anyhow::anyhow;
use burn_float8::{Float8Error, report::NonFiniteOperand};

/// Why a run ended before its last step, or failed at its end. `Error::downcast_ref` finds it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RunError {
    /// A signal or an unwritable log stopped the run.
    #[error("stopped by {signal} after step {step}; {}", goes_on(folder.as_deref()))]
    Interrupted {
        /// Name of the signal, or a text about the unwritable log.
        signal: &'static str,
        /// Completed steps.
        step: usize,
        /// The folder of checkpoints, which has the step; `None` if the run has no checkpoints.
        folder: Option<PathBuf>,
    },
    /// Loss or gradients are no longer finite.
    #[error(transparent)]
    Diverged(Box<Divergence>),
    /// The validation loss is not finite.
    #[error("training diverged: validation loss = {loss} after {steps} steps")]
    HeldOutDiverged {
        /// Completed optimizer steps; 0 means that the initial parameters are at fault.
        steps: usize,
        /// The loss.
        loss: f64,
    },
    /// With `float8.strict`, a GEMM that should run in FP8 did not.
    #[error("float8.strict: {0}")]
    Strict(#[source] Float8Error),
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

fn goes_on(folder: Option<&Path>) -> String {
    match folder {
        Some(folder) => format!("`float8 resume {}` continues from there", folder.display()),
        None => {
            "nothing of the run is saved: with --output-dir FOLDER (checkpoint.output_dir) `float8 resume` continues it"
                .into()
        }
    }
}

fn first(cause: Option<&NonFiniteOperand>) -> String {
    cause.map_or_else(String::new, |cause| format!("; the first non-finite operand: {cause}"))
}

fn way_back(saved: &[u64], folder: Option<&PathBuf>) -> String {
    let ([_, ..], Some(folder)) = (saved, folder) else { return String::new() };
    let steps: Vec<_> = saved.iter().map(u64::to_string).collect();
    format!(
        "; checkpoints with finite numbers: step {}; `float8 resume {} --from-step N` continues from one, and may lower optimizer.lr or change \
         float8.schedule",
        steps.join(", "),
        folder.display()
    )
}

/// Error of a device that failed while `doing` something.
pub(crate) fn device_failed(doing: &str, reason: impl Display) -> anyhow::Error {
    anyhow!("the device failed while {doing}: {reason}")
}
