//! Parameters of delayed scaling.
use serde::{Deserialize, Serialize};

use crate::error::Float8Error;

/// Reduction of an amax history to one amax.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[cfg_attr(feature = "schemars", derive(schemars::JsonSchema))]
pub enum AmaxComputeAlgo {
    /// The largest amax of the history.
    #[default]
    Max,
    /// The amax of the last step.
    MostRecent,
}

/// TransformerEngine's delayed scaling: `scale = FMAX / (algo(history) · 2^margin)`.
///
/// The history holds one amax per past optimizer step: the largest of its micro-batches. All
/// histories advance together when a step begins. It begins when a linear reads a parameter built
/// since the last step began, if backward has passed a layer since then.
/// [`begin_float8_step`](crate::begin_float8_step) lists the models that need a call instead.
///
/// A step whose amax is 0, inf or NaN leaves history and scale unchanged. An amax counts only after
/// backward reaches its tensor, so evaluations do not count. Backward never reaches a frozen linear
/// at the start of a model. Its last forward before another linear's backward counts instead.
///
/// A tensor without a history, as in the first step, is scaled by its own amax. A tensor read by
/// several linears uses the history of the linear that casts it first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
#[cfg_attr(feature = "schemars", derive(schemars::JsonSchema))]
pub struct DelayedScaling {
    /// Number of steps in the history, 1 to 65536.
    pub amax_history_len: usize,
    /// Reduction of the history to one amax.
    pub amax_compute_algo: AmaxComputeAlgo,
    /// Headroom as a power of two, -8 to 8.
    pub margin: i32,
}

impl Default for DelayedScaling {
    /// TransformerEngine's defaults: the maximum of 1024 steps, without a margin.
    fn default() -> Self {
        Self { amax_history_len: 1024, amax_compute_algo: AmaxComputeAlgo::Max, margin: 0 }
    }
}

impl DelayedScaling {
    /// Checks the ranges.
    ///
    /// # Errors
    ///
    /// [`Float8Error::Config`] if the length or the margin is out of range.
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
