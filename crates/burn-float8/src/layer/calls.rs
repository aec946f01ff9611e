//! [`GemmCalls`]: the calls of one GEMM of a layer, counted by path.
use std::sync::Arc;

use float8_kernels::{Cast, GemmPath};
use serde::{Deserialize, Serialize};

use crate::backend::OperandSize;
use crate::terms::Reason;

/// Reads the amax of a cast's tensor, if observed, and the amax that set the scale.
pub(crate) trait ReadAmax: Send + Sync {
    fn read(&self) -> (Option<f32>, f32);
}

/// An operand of the last FP8 call of a GEMM.
#[derive(Clone)]
pub(crate) struct LastOperand {
    pub(crate) size: OperandSize,
    pub(crate) cast: Cast,
    pub(crate) amaxes: Arc<dyn ReadAmax>,
}

/// Numbers of calls by path, and the last calls.
#[derive(Clone, Default)]
pub(crate) struct GemmCalls {
    /// FP8 calls of each path, by first use.
    pub(crate) float8: Vec<(GemmPath, u64)>,
    pub(crate) high_precision: u64,
    /// Kernel of high-precision calls, if it was not Burn's.
    pub(crate) high_precision_kernel: Option<&'static str>,
    /// Path of the last FP8 call, and its operands.
    pub(crate) last: Option<(GemmPath, [LastOperand; 2])>,
    /// Reason of the last high-precision call.
    pub(crate) reason: Option<Reason>,
    /// Reason of the last unrequested high-precision call.
    pub(crate) unrequested: Option<Reason>,
}

impl GemmCalls {
    pub(crate) fn totals(&self) -> GemmTotals {
        let float8 = |native| self.float8.iter().filter(|(path, _)| path.is_native() == native).map(|(_, n)| n).sum();
        GemmTotals { native: float8(true), emulated: float8(false), high_precision: self.high_precision }
    }
}

/// GEMM calls by path, summed over a model.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct GemmTotals {
    /// Calls on FP8 tensor cores, or with few rows by [`GemmPath::Gemv`].
    pub native: u64,
    /// Calls with FP8 numerics but without FP8 tensor cores.
    pub emulated: u64,
    /// Calls in the tensors' own dtype.
    pub high_precision: u64,
}

impl core::iter::Sum for GemmTotals {
    fn sum<I: Iterator<Item = Self>>(totals: I) -> Self {
        totals.fold(Self::default(), |sum, t| Self {
            native: sum.native + t.native,
            emulated: sum.emulated + t.emulated,
            high_precision: sum.high_precision + t.high_precision,
        })
    }
}

impl core::fmt::Display for GemmTotals {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        let Self { native, emulated, high_precision } = self;
        write!(f, "GEMMs: {native} in FP8, {emulated} in FP8 emulated, {high_precision} in high precision")
    }
}
