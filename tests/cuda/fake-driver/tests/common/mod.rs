//! The driver in a test's process.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
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
        let toolkit = without_slow_headers(&toolkit).unwrap_or_else(|error| panic!("{error}"));
        // SAFETY: every test begins here, so that no other thread has used the environment's CUDA
        // variables, or a driver.
        Some(unsafe { open(&toolkit, devices) }.unwrap_or_else(|error| panic!("{error}")))
    };
    codegen::device::sleep_longer();
    DRIVER.get_or_init(load).as_ref()
}

/// Headers that CubeCL includes with TMA, and these tests' kernels do not use. NVRTC needs four seconds
/// to read them.
const SLOW: [&str; 3] = ["cooperative_groups.h", "cooperative_groups/memcpy_async.h", "cuda/barrier"];

/// Folder of links to the toolkit, in which those headers are empty.
fn without_slow_headers(toolkit: &Path) -> std::io::Result<PathBuf> {
    let name = toolkit.to_string_lossy().replace('/', "_");
    let root = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    for folder in ["", "include", "include/cuda", "include/cooperative_groups"] {
        fs::create_dir_all(root.join(folder))?;
    }
    for header in SLOW {
        fs::write(root.join("include").join(header), "")?;
    }
    for folder in ["include/cuda", "include/cooperative_groups", "include", ""] {
        for entry in toolkit.join(folder).read_dir().into_iter().flatten() {
            let entry = entry?;
            let link = root.join(folder).join(entry.file_name());
            // Another run may have made it.
            if !link.exists()
                && let Err(error) = symlink(entry.path(), &link)
                && !link.exists()
            {
                return Err(error);
            }
        }
    }
    Ok(root)
}
