//! [`Policy`]: in which precision a linear runs.
use float8_kernels::Cast;

use super::cast::Casts;
use super::linear::Float8LinearConfig;
use crate::terms::{Operand, Reason};

/// In which precision a linear runs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Policy {
    /// In FP8, GEMM by GEMM as configured.
    Float8(Float8LinearConfig),
    /// All three GEMMs in high precision, and why.
    HighPrecision(Reason),
}

impl Policy {
    /// The cast of the weight whose codes fprop reads; none where that is in high precision.
    pub fn weight_cast(&self) -> Option<Cast> {
        match self {
            Self::Float8(config) if !config.casts()[Operand::WEIGHT_T].is_disabled() => {
                Some(config.kernel_cast(Operand::WEIGHT_T))
            }
            _ => None,
        }
    }

    /// The casts of a linear in FP8.
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
