//! [`SelfCheckReport`].
use core::fmt::{Display, Formatter, Result};

use float8_kernels::Granularity;
use serde::{Deserialize, Serialize};

use crate::error::{Float8Error, SelfCheckFailure};

/// Self-check results of a device.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct SelfCheckReport {
    /// Number of correct kernel variants, each compiled with its parameters.
    pub kernels: usize,
    /// Seconds spent on checks.
    pub seconds: f64,
    /// Wrong kernels, which are disabled.
    pub failures: Vec<SelfCheckFailure>,
    /// Whether checks are off.
    pub off: bool,
    /// Device message for a lost result: a panic of its thread, or an error.
    pub lost: Option<String>,
}

impl SelfCheckReport {
    /// Disabled paths of GEMMs with these granularities.
    pub(crate) fn lost_paths(&self, granularities: [Granularity; 2]) -> Vec<&str> {
        let of_these = self.failures.iter().filter(|failure| failure.granularities == Some(granularities));
        of_these.map(|failure| &*failure.path).collect()
    }

    /// The first lost result, else the first wrong kernel.
    pub(crate) fn fault(&self) -> Option<Float8Error> {
        let lost = self.lost.clone().map(|message| Float8Error::Lost { message });
        lost.or_else(|| self.failures.first().cloned().map(Float8Error::SelfCheck))
    }

    /// Merges the results of two devices.
    pub(crate) fn and(self, other: Self) -> Self {
        let mut failures = self.failures;
        failures.extend(other.failures);
        Self {
            kernels: self.kernels + other.kernels,
            seconds: self.seconds + other.seconds,
            failures,
            off: self.off || other.off,
            lost: self.lost.or(other.lost),
        }
    }
}

impl Display for SelfCheckReport {
    fn fmt(&self, f: &mut Formatter<'_>) -> Result {
        let Self { kernels, seconds, failures, off, lost } = self;
        if *off {
            write!(f, "self-check: off")?;
        } else {
            let verdict = if failures.is_empty() { ", all right" } else { " right" };
            write!(f, "self-check: {kernels} kernels{verdict}, {seconds:.2} s")?;
        }
        failures.iter().try_for_each(|failure| write!(f, "; {failure}"))?;
        lost.iter().try_for_each(|lost| write!(f, "; results are lost: {lost}"))
    }
}
