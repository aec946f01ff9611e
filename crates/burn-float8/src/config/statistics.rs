//! Quantization statistics of casts, and limits that move a layer out of FP8.
use serde::{Deserialize, Serialize};

use crate::error::Float8Error;
use crate::terms::Recipe;

/// Statistics of sampled optimizer steps, for the operands that a layer reads in training: SQNR
/// against the high-precision tensor, and shares saturated and flushed to zero.
///
/// Samples of a forward count only after its backward. Evaluations are therefore never sampled, nor
/// is the x of a layer with a frozen weight. A sampled step reads each operand once more and waits
/// for the device at its end. Other steps have no cost.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[cfg_attr(feature = "schemars", derive(schemars::JsonSchema))]
pub struct StatisticsConfig {
    /// Number of optimizer steps between samples. The first step is sampled.
    pub every_n_steps: u64,
    /// Other recipes to cast the same tensors with, for comparison. `delayed` is not possible,
    /// since it needs a history.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[cfg_attr(feature = "schemars", schemars(!skip_serializing_if))]
    pub compare: Vec<Recipe>,
}

impl StatisticsConfig {
    /// Samples every `every_n_steps` steps without a comparison.
    pub fn every(every_n_steps: u64) -> Self {
        Self { every_n_steps, compare: vec![] }
    }

    /// Adds recipes to compare with.
    pub fn with_compare(mut self, recipes: impl IntoIterator<Item = Recipe>) -> Self {
        self.compare = recipes.into_iter().collect();
        self
    }
}

/// Precision of a layer after it crosses a limit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[cfg_attr(feature = "schemars", derive(schemars::JsonSchema))]
pub enum FallbackTo {
    /// All three GEMMs in high precision.
    #[default]
    HighPrecision,
    /// The recipe `rowwise`, then high precision if the layer crosses a limit again.
    Rowwise,
}

/// Limits on a layer's sampled statistics. If an operand crosses one, its layer moves for the rest
/// of the run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
#[cfg_attr(feature = "schemars", derive(schemars::JsonSchema))]
pub struct FallbackConfig {
    /// Minimum SQNR in dB. Tensors without an SQNR (all zeros, or too large to square) pass.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub min_sqnr_db: Option<f64>,
    /// Maximum share of saturated codes, from 0 to below 1.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_saturated: Option<f64>,
    /// Maximum share of codes flushed to zero, from 0 to below 1.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_flushed: Option<f64>,
    /// Maximum number of elements that are infinite or NaN, or have such codes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_non_finite: Option<u64>,
    /// Precision of the layer after a fallback.
    pub to: FallbackTo,
}

impl FallbackConfig {
    /// Checks the limits.
    ///
    /// # Errors
    ///
    /// If a limit can never be crossed or is always crossed, or all limits are absent.
    pub(super) fn validate(&self) -> Result<(), Float8Error> {
        let Self { min_sqnr_db, max_saturated, max_flushed, .. } = *self;
        let other = min_sqnr_db.or(max_saturated).or(max_flushed);
        if other.is_none() && self.max_non_finite.is_none() {
            let reason = "no limit: set min_sqnr_db, max_saturated, max_flushed or max_non_finite";
            return Err(Float8Error::config("fallback", "{}", reason));
        }
        let limits = [("fallback.max_saturated", max_saturated, 1.0), ("fallback.max_flushed", max_flushed, 1.0)];
        for (field, limit, largest) in limits.into_iter().chain([("fallback.min_sqnr_db", min_sqnr_db, 200.0)]) {
            if let Some(value) = limit
                && !(0.0..largest).contains(&value)
            {
                return Err(Float8Error::config(field, value, format!("must be from 0 to below {largest}")));
            }
        }
        Ok(())
    }
}
