//! Why steps cannot be profiled.

use std::time::Duration;

/// Why steps cannot be profiled.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ProfileError {
    /// The device's runtime is not in this build of the crate.
    #[error("[profile]: this build cannot profile {device}: enable the feature `wgpu` or `cuda` of the crate `train`")]
    NotCompiled {
        /// The device.
        device: String,
    },
    /// The CubeCL configuration is not to be changed once it was read.
    #[error(
        "[profile]: this process has used a GPU before, so that CubeCL does not time its kernels: profile in a process of its own"
    )]
    TooLate,
    /// CubeCL's log, a file in the folder of temporary files, cannot be made or read.
    #[error("[profile]: cannot keep a log of kernels in {}", std::env::temp_dir().display())]
    Log(#[from] std::io::Error),
    /// The device failed.
    #[error("[profile]: the device failed: {reason}")]
    Device {
        /// Its reason.
        reason: String,
    },
    /// CubeCL has not written what it was to.
    #[error("[profile]: CubeCL has not logged the kernels that were launched within {} s", waited.as_secs())]
    Missing {
        /// How long was waited.
        waited: Duration,
    },
}
