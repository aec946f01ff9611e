//! [`SelfCheckFailure`]: a wrong kernel on a device.
use float8_kernels::Granularity;
use serde::{Deserialize, Serialize};

/// A kernel disabled on a device because its result differs from the scalar reference.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SelfCheckFailure {
    /// The checked call, with shapes, formats and scales.
    pub call: String,
    /// Path of a GEMM, or instructions of a cast.
    pub path: String,
    /// Granularities of a GEMM's operands. GEMMs with these granularities use another path from
    /// then on.
    pub granularities: Option<[Granularity; 2]>,
    /// The first wrong element and its correct value, or the device's error.
    pub found: String,
}

impl core::fmt::Display for SelfCheckFailure {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        let Self { call, path, found, .. } = self;
        write!(f, "self-check of {path} failed: {call}: {found}")
    }
}
