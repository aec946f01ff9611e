//! [`SelfCheckFailure`]: a kernel that is wrong on a device.
use float8_kernels::Granularity;
use serde::{Deserialize, Serialize};

/// A kernel that is disabled on the device: its result differs from the scalar reference.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SelfCheckFailure {
    /// The call that was judged, with shapes, formats and scales.
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
