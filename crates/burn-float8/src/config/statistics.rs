//! Health statistics of casts, and when they move a layer out of FP8.
use serde::{Deserialize, Serialize};

use crate::error::Float8Error;
use crate::terms::Recipe;

/// Statistics of sampled optimizer steps: shares saturated and flushed to zero, and SQNR against the high-precision tensor,
/// of the operands that a layer reads in training, once a step. Those of a forward count once its backward has come, so evaluations are
/// never sampled, nor is the x of a layer whose weight is frozen. A sampled step reads each operand once more and waits for the device at
/// its end; other steps cost nothing.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[cfg_attr(feature = "schemars", derive(schemars::JsonSchema))]
pub struct StatisticsConfig {
    /// Optimizer steps from one sample to the next; the first step is sampled.
    pub every_n_steps: u64,
    /// Recipes to cast the same tensors with, to see what they would have given; not `delayed`, which needs a history.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[cfg_attr(feature = "schemars", schemars(!skip_serializing_if))]
    pub compare: Vec<Recipe>,
}

impl StatisticsConfig {
    /// Every so many steps, compared with nothing.
    pub fn every(every_n_steps: u64) -> Self {
        Self { every_n_steps, compare: vec![] }
    }

    /// Also says what these recipes would have given.
    pub fn with_compare(mut self, recipes: impl IntoIterator<Item = Recipe>) -> Self {
        self.compare = recipes.into_iter().collect();
        self
    }
}

/// Where a layer that is not well in FP8 goes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[cfg_attr(feature = "schemars", derive(schemars::JsonSchema))]
pub enum FallbackTo {
    /// All three GEMMs in high precision.
    #[default]
    HighPrecision,
    /// The recipe `rowwise`; high precision if the layer fails in it too.
    Rowwise,
}

/// Limits on a layer's sampled statistics. An operand beyond one of them moves its layer, for the rest of the run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
#[cfg_attr(feature = "schemars", derive(schemars::JsonSchema))]
pub struct FallbackConfig {
    /// Smallest SQNR, dB; a tensor without one, all zeros or too large to square, is not below it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub min_sqnr_db: Option<f64>,
    /// Largest share of codes saturated, from 0 to below 1.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_saturated: Option<f64>,
    /// Largest share of codes flushed to zero, from 0 to below 1.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_flushed: Option<f64>,
    /// Most elements that are infinite or NaN, or whose codes are.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_non_finite: Option<u64>,
    /// Where the layer goes.
    pub to: FallbackTo,
}

impl FallbackConfig {
    /// # Errors
    ///
    /// A limit that can never or will always be crossed; no limit at all.
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
