//! The driver in a test's process.

use std::path::PathBuf;
use std::sync::OnceLock;

use fake_cuda::{Driver, open};

/// Opens the driver once with these devices. Without NVRTC, prints that the test is skipped and
/// returns None.
///
/// # Panics
/// If `FLOAT8_CUDA_TOOLS` is not set in CI, or the driver does not load.
pub fn driver(devices: &str) -> Option<&'static Driver> {
    static DRIVER: OnceLock<Option<Driver>> = OnceLock::new();
    let load = || {
        let Some(toolkit) = std::env::var_os("FLOAT8_CUDA_TOOLS").map(PathBuf::from) else {
            test_data::skip(test_data::CUDA_TOOLS);
            return None;
        };
        // SAFETY: every test begins here, so that no other thread has used the environment's CUDA
        // variables, or a driver.
        Some(unsafe { open(&toolkit, devices) }.unwrap_or_else(|error| panic!("{error}")))
    };
    DRIVER.get_or_init(load).as_ref()
}
