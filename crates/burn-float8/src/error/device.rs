//! [`DeviceError`]: why results of a device are not to be used, or not of some of its kernels.
use float8_kernels::Granularity;
use serde::{Deserialize, Serialize};

/// Why a device cannot compute in FP8, or has not computed what it was asked for.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum DeviceError {
    /// What its kernels are compiled with is missing, or does not fit the driver.
    #[error(transparent)]
    Setup(#[from] device_select::DeviceError),
    /// A small cast and product do not come out right, by any kernel.
    #[error("the device does not compute: a {what} of 64 by 64 failed on every path: {reason}")]
    Preflight {
        /// `cast` or `GEMM`.
        what: &'static str,
        /// What was found.
        reason: String,
    },
    /// The device was to compute something and has not, and went on with memory that nobody has written: a task of its thread has
    /// panicked, or a launch has failed.
    #[error("results on the device are lost: {message}")]
    Lost {
        /// What it said.
        message: String,
    },
    /// A kernel is wrong on this device.
    #[error("{0}")]
    SelfCheck(SelfCheckFailure),
    /// `FLOAT8_SELF_CHECK` is neither of its values.
    #[error("FLOAT8_SELF_CHECK={value:?}: expected first_use or off")]
    SelfCheckVariable {
        /// Its value.
        value: String,
    },
}

/// A kernel whose result on operands of its own is not the scalar reference's, so that it is disabled on the device.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SelfCheckFailure {
    /// What was judged, with the shapes of its operands, formats and scales.
    pub call: String,
    /// The path of a GEMM, or the instructions of a cast.
    pub path: String,
    /// The granularities of a GEMM's operands: GEMMs of such operands take another path from then on.
    pub granularities: Option<[Granularity; 2]>,
    /// The first element that is wrong and its right value, or the device's error.
    pub found: String,
}

impl core::fmt::Display for SelfCheckFailure {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        let Self { call, path, found, .. } = self;
        write!(f, "self-check of {path} failed: {call}: {found}")
    }
}
