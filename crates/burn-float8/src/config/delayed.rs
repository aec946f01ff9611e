//! The parameters of delayed scaling.
use serde::{Deserialize, Serialize};

use crate::error::Float8Error;

/// How delayed scaling turns a history into one amax.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[cfg_attr(feature = "schemars", derive(schemars::JsonSchema))]
pub enum AmaxComputeAlgo {
    /// The largest of the history.
    #[default]
    Max,
    /// The amax of the last step.
    MostRecent,
}

/// TransformerEngine's delayed scaling: `scale = FMAX / (algo(history) · 2^margin)`.
///
/// The history holds one amax for each past optimizer step, the largest of its micro-batches. Histories of all layers move
/// together, when a linear first reads a parameter that was built since the last step began, and backward has come through a
/// layer since then ([`begin_float8_step`](crate::begin_float8_step) says when that needs help). A step whose amax is 0, inf or
/// NaN leaves history and scale as they were. An amax counts once backward has come to its tensor, so evaluations leave no
/// trace. No backward comes to a frozen linear at the beginning of a model: there the last forward before another linear's backward
/// counts. A tensor without a history, as in the first step, is scaled by its own amax. A tensor that several linears
/// read belongs to the history of the one that casts it first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
#[cfg_attr(feature = "schemars", derive(schemars::JsonSchema))]
pub struct DelayedScaling {
    /// Steps in the history, 1 to 65536.
    pub amax_history_len: usize,
    /// What is taken from it.
    pub amax_compute_algo: AmaxComputeAlgo,
    /// Powers of two of headroom, -8 to 8.
    pub margin: i32,
}

impl Default for DelayedScaling {
    /// TransformerEngine's defaults: 1024 steps, their maximum, no margin.
    fn default() -> Self {
        Self { amax_history_len: 1024, amax_compute_algo: AmaxComputeAlgo::Max, margin: 0 }
    }
}

impl DelayedScaling {
    /// # Errors
    ///
    /// [`Float8Error::Config`] for a length or a margin out of range.
    pub(super) fn validate(&self) -> Result<(), Float8Error> {
        if !(1..=1 << 16).contains(&self.amax_history_len) {
            let key = "delayed_scaling.amax_history_len";
            return Err(Float8Error::config(key, self.amax_history_len, "must be 1 to 65536"));
        }
        if !(-8..=8).contains(&self.margin) {
            return Err(Float8Error::config("delayed_scaling.margin", self.margin, "must be -8 to 8"));
        }
        Ok(())
    }
}
