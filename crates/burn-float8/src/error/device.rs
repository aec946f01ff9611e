//! [`SelfCheckFailure`]: a kernel that is wrong on a device.
use std::borrow::Cow;

use float8_kernels::Granularity;
use serde::{Deserialize, Serialize};

/// A call whose result was not that of the scalar reference, so that what it launched is not launched on the device again.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SelfCheckFailure {
    /// The kernels that the call had launched.
    pub kernels: Vec<Cow<'static, str>>,
    /// What was computed, with shapes, formats and scales.
    pub call: String,
    /// The path of a GEMM, or the instructions of a cast.
    pub path: String,
    /// The granularities of a GEMM's operands: GEMMs of such operands take another path from then on.
    pub granularities: Option<[Granularity; 2]>,
    /// What was wrong: the sample, what it is and what it should be; or the device's error.
    pub found: String,
}

impl core::fmt::Display for SelfCheckFailure {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        let Self { kernels, call, path, found, .. } = self;
        write!(f, "self-check of {path} failed ({}): {call}: {found}", kernels.join(", "))
    }
}
