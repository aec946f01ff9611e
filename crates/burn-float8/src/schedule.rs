//! [`PrecisionSchedule`]: high precision at the beginning and end of a run, FP8 between, in one run.
use burn::module::{Module, ModuleVisitor, Param};
use burn::tensor::Tensor;
use serde::{Deserialize, Serialize};

use crate::backend::Float8Ops;
use crate::error::Float8Error;

/// A part of a run.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(untagged, expecting = "expected a whole number of steps or a fraction from 0 to 1")]
pub enum Span {
    /// Optimizer steps: a whole number in a file.
    Steps(u64),
    /// A share of all steps, 0 to 1, rounded to the nearest step: a number with a point in a file.
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

/// High precision, then FP8, then high precision again. Nothing is rebuilt at a switch: parameters, optimizer state and
/// amax histories stay as they are, so that the first FP8 step is that of an FP8 run from the same state, bit for bit.
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
/// Before each step, call [`set_float8_enabled`] with what [`is_float8`](Self::is_float8) says.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "RawSchedule")]
pub struct PrecisionSchedule {
    warmup: Span,
    cooldown: Span,
}

#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct RawSchedule {
    warmup: Span,
    cooldown: Span,
}

impl TryFrom<RawSchedule> for PrecisionSchedule {
    type Error = Float8Error;

    fn try_from(raw: RawSchedule) -> Result<Self, Float8Error> {
        Self::new(raw.warmup, raw.cooldown)
    }
}

impl PrecisionSchedule {
    /// High precision for the first `warmup` and the last `cooldown` of the steps.
    ///
    /// # Errors
    ///
    /// [`Float8Error::Schedule`] for a fraction outside 0 to 1.
    pub fn new(warmup: Span, cooldown: Span) -> Result<Self, Float8Error> {
        for (field, span) in [("schedule.warmup", warmup), ("schedule.cooldown", cooldown)] {
            if let Span::Fraction(share) = span
                && !(0.0..=1.0).contains(&share)
            {
                return Err(Float8Error::Schedule {
                    field,
                    value: share.to_string(),
                    range: "a whole number of steps or a fraction from 0 to 1",
                });
            }
        }
        Ok(Self { warmup, cooldown })
    }

    /// Whether step `step`, counted from 0, of `total` runs in FP8.
    pub fn is_float8(&self, step: u64, total: u64) -> bool {
        step >= self.warmup.steps(total) && step < total.saturating_sub(self.cooldown.steps(total))
    }
}

/// Switches FP8 on or off for all converted linears of a model, and of the models that share their layers: clones,
/// `valid()` copies, replicas. The report gives the reason `precision schedule`; strict mode does not mind.
pub fn set_float8_enabled<B: Float8Ops, M: Module<B>>(model: &M, enabled: bool) {
    struct Switch(bool);
    impl<B: Float8Ops> ModuleVisitor<B> for Switch {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
            if let Some(layer) = B::layer(&param.val().into_primitive().tensor()) {
                layer.group().set_paused(!self.0);
            }
        }
    }
    Module::<B>::visit(model, &mut Switch(enabled));
}
