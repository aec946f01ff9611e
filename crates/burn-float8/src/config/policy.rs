//! [`Policy`]: the precision of a linear.
use float8_kernels::Cast;

use super::cast::Casts;
use super::linear::Float8LinearConfig;
use crate::terms::{Operand, Reason};

/// Precision of a linear.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Policy {
    /// FP8, with settings per GEMM.
    Float8(Float8LinearConfig),
    /// All three GEMMs in high precision, with the reason.
    HighPrecision(Reason),
}

impl Policy {
    /// Cast of the weight in fprop. None if the weight stays in high precision.
    pub fn weight_cast(&self) -> Option<Cast> {
        match self {
            Self::Float8(config) if !config.casts()[Operand::WEIGHT_T].is_disabled() => {
                Some(config.kernel_cast(Operand::WEIGHT_T))
            }
            _ => None,
        }
    }

    /// Casts of a linear in FP8.
    pub(crate) fn casts(&self) -> Option<Casts> {
        match self {
            Self::Float8(config) => Some(config.casts()),
            Self::HighPrecision(_) => None,
        }
    }
}

impl core::fmt::Display for Policy {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        match self {
            Self::Float8(config) => config.fmt(f),
            Self::HighPrecision(reason) => write!(f, "high precision: {reason}"),
        }
    }
}
