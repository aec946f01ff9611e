//! [`PrecisionSchedule`]: high precision at the start and end of a run, FP8 in between.
use serde::{Deserialize, Serialize};

use crate::config::checked;
use crate::error::Float8Error;

/// A part of a run.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(untagged, expecting = "expected a whole number of steps or a fraction from 0 to 1")]
#[cfg_attr(feature = "schemars", derive(schemars::JsonSchema))]
pub enum Span {
    /// Number of optimizer steps, an integer in a file.
    Steps(u64),
    /// Share of all steps, 0 to 1, rounded to the nearest step. A float in a file.
    Fraction(f64),
}

impl Default for Span {
    fn default() -> Self {
        Self::Steps(0)
    }
}

impl Span {
    fn steps(self, total: u64) -> u64 {
        match self {
            Self::Steps(steps) => steps,
            Self::Fraction(share) => (share * total as f64).round() as u64,
        }
    }
}

/// High precision, then FP8, then high precision again. A switch rebuilds nothing. Parameters,
/// optimizer state and amax histories stay, so the first FP8 step is bit-identical to a step of an
/// FP8 run from the same state.
///
/// ```
/// use burn_float8::{PrecisionSchedule, Span};
///
/// let schedule = PrecisionSchedule::new(Span::Steps(100), Span::Fraction(0.1))?;
/// assert!(!schedule.is_float8(99, 1000));
/// assert!(schedule.is_float8(100, 1000) && schedule.is_float8(899, 1000));
/// assert!(!schedule.is_float8(900, 1000));
/// # Ok::<(), burn_float8::Float8Error>(())
/// ```
///
/// Before each step, call [`set_float8_enabled`](crate::set_float8_enabled) with the result of
/// [`is_float8`](Self::is_float8).
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(remote = "Self", deny_unknown_fields, default)]
#[cfg_attr(feature = "schemars", derive(schemars::JsonSchema), schemars(!remote))]
pub struct PrecisionSchedule {
    /// Length of the high-precision phase at the start of the run.
    warmup: Span,
    /// Length of the high-precision phase at the end of the run.
    cooldown: Span,
}

checked!(PrecisionSchedule, |Self { warmup, cooldown }| Self::new(warmup, cooldown));

impl PrecisionSchedule {
    /// High precision for the first `warmup` and the last `cooldown` of the steps.
    ///
    /// # Errors
    ///
    /// [`Float8Error::Config`] if a fraction is outside 0 to 1, or two fractions exceed 1 together.
    pub fn new(warmup: Span, cooldown: Span) -> Result<Self, Float8Error> {
        for (field, span) in [("schedule.warmup", warmup), ("schedule.cooldown", cooldown)] {
            if let Span::Fraction(share) = span
                && !(0.0..=1.0).contains(&share)
            {
                let reason = "must be a whole number of steps or a fraction from 0 to 1";
                return Err(Float8Error::config(field, share, reason));
            }
        }
        if let (Span::Fraction(first), Span::Fraction(last)) = (warmup, cooldown)
            && first + last > 1.0
        {
            let (key, reason) =
                ("schedule.warmup + schedule.cooldown", "must be at most 1: nothing is left to run in FP8");
            return Err(Float8Error::config(key, first + last, reason));
        }
        Ok(Self { warmup, cooldown })
    }

    /// Whether step `step`, counted from 0, of `total` runs in FP8.
    pub fn is_float8(&self, step: u64, total: u64) -> bool {
        step >= self.warmup.steps(total) && step < total.saturating_sub(self.cooldown.steps(total))
    }
}
