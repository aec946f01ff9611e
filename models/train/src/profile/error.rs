//! Errors of profiling.

use std::time::Duration;

/// Error of profiling.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ProfileError {
    /// The device's runtime was not compiled in.
    #[error("[profile]: this build cannot profile {device}: enable the feature `wgpu` or `cuda` of the crate `train`")]
    NotCompiled {
        /// The device.
        device: String,
    },
    /// The CubeCL configuration cannot be changed after its first use.
    #[error(
        "[profile]: this process has used a GPU before, so that CubeCL does not time its kernels: profile in a process of its own"
    )]
    TooLate,
    /// CubeCL's log, a temporary file, cannot be created or read.
    #[error("[profile]: cannot keep a log of kernels in {}", std::env::temp_dir().display())]
    Log(#[from] std::io::Error),
    /// The device failed.
    #[error("[profile]: the device failed: {reason}")]
    Device {
        /// Its reason.
        reason: String,
    },
    /// CubeCL has not written the expected lines.
    #[error("[profile]: CubeCL has not logged the kernels that were launched within {} s", waited.as_secs())]
    Missing {
        /// Time waited.
        waited: Duration,
    },
}
