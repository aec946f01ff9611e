//! Statistics of a layer's casts as the report shows them, and where they have moved the layer.
use float8_kernels::Health;
use serde::{Deserialize, Serialize};

use crate::config::FallbackTo;
use crate::terms::Recipe;

/// How well FP8 codes represent the tensor that they were cast from.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct CastHealth {
    /// `10 log10(Σ x² / Σ (x − x̂)²)` over finite elements, dB; none if x is zero or the sums are not finite, infinite if
    /// nothing was lost.
    #[serde(with = "non_finite")]
    pub sqnr_db: Option<f64>,
    /// Share of elements beyond the format's range, `|x · scale| > FMAX`.
    pub saturated: f64,
    /// Share of elements that are not zero but have a zero code.
    pub flushed: f64,
    /// Elements that are infinite or NaN, or whose codes stand for such.
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

/// A number, or the name of a value for which JSON has no number: `inf`, `-inf`, `NaN`.
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

/// One operand of a layer in one sampled step.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct OperandHealth {
    /// The optimizer step, counted from 1.
    pub step: u64,
    /// The cast that ran.
    pub cast: CastHealth,
    /// How well other recipes represent the same tensor.
    pub compare: Vec<(Recipe, CastHealth)>,
}

/// A layer that statistics have moved out of its recipe.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Fallback {
    /// The optimizer step after which it happened.
    pub step: u64,
    /// Where the layer went.
    pub to: FallbackTo,
    /// The limit and the value that crossed it.
    pub reason: String,
}
