//! Statistics of a layer's casts for the report, and the fallback of the layer.
use float8_kernels::Health;
use serde::{Deserialize, Serialize};

use crate::config::FallbackTo;
use crate::terms::Recipe;

/// Quantization error of FP8 codes relative to the tensor they were cast from.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct CastHealth {
    /// `10 log10(Σ x² / Σ (x − x̂)²)` over finite elements, in dB. None if x is zero or the sums
    /// are not finite. Infinite if the codes are exact.
    #[serde(with = "non_finite")]
    pub sqnr_db: Option<f64>,
    /// Share of elements beyond the format's range, `|x · scale| > FMAX`.
    pub saturated: f64,
    /// Share of nonzero elements with a zero code.
    pub flushed: f64,
    /// Number of elements that are infinite or NaN, or have such codes.
    pub non_finite: u64,
}

impl From<Health> for CastHealth {
    fn from(health: Health) -> Self {
        Self {
            sqnr_db: health.sqnr_db(),
            saturated: health.saturated_share(),
            flushed: health.flushed_share(),
            non_finite: health.non_finite,
        }
    }
}

/// Serializes non-finite numbers, which JSON lacks, as strings: `inf`, `-inf`, `NaN`.
pub(crate) mod non_finite {
    use core::fmt::Display;
    use core::str::FromStr;

    use serde::de::{Deserialize, Deserializer, Error};
    use serde::ser::{Serialize, Serializer};

    pub(crate) fn serialize<T: Copy + Into<f64> + Serialize, S: Serializer>(
        x: &Option<T>,
        s: S,
    ) -> Result<S::Ok, S::Error> {
        match x {
            Some(x) if !(*x).into().is_finite() => s.serialize_str(&(*x).into().to_string()),
            x => x.serialize(s),
        }
    }

    pub(crate) fn deserialize<'de, T, D>(d: D) -> Result<Option<T>, D::Error>
    where
        T: Deserialize<'de> + FromStr<Err: Display>,
        D: Deserializer<'de>,
    {
        #[derive(serde::Deserialize)]
        #[serde(untagged)]
        enum Number<T> {
            Finite(T),
            Named(String),
        }
        match Option::deserialize(d)? {
            Some(Number::Finite(x)) => Ok(Some(x)),
            Some(Number::Named(name)) => name.parse().map(Some).map_err(Error::custom),
            None => Ok(None),
        }
    }
}

/// Statistics of one operand of a layer in one sampled step.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct OperandHealth {
    /// The optimizer step, counted from 1.
    pub step: u64,
    /// The cast that ran.
    pub cast: CastHealth,
    /// Results of other recipes for the same tensor.
    pub compare: Vec<(Recipe, CastHealth)>,
}

/// Fallback of a layer: statistics moved it out of its recipe.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Fallback {
    /// The optimizer step after which the layer moved.
    pub step: u64,
    /// Precision of the layer from then on.
    pub to: FallbackTo,
    /// The limit and the value that crossed it.
    pub reason: String,
}
