//! A CUDA driver without a GPU: the functions of `libcuda.so` that CubeCL's server and cudarc call,
//! with launches run by the PTX interpreter.
//!
//! The library's file has another name than the driver's, and its SONAME is the driver's. So
//! nothing finds it unless it is loaded by path ([`open`], or `LD_PRELOAD` for a program). Later
//! requests for `libcuda.so` in that process are then answered with it.
//!
//! ```text
//! cargo build --release -p fake-driver
//! export CUDA_PATH=$FLOAT8_CUDA_TOOLS LD_LIBRARY_PATH=$FLOAT8_CUDA_TOOLS/lib
//! LD_PRELOAD=target/release/libfake_cuda.so target/release/float8 train --device cuda --model llama3-debug \
//!     --steps 1 --set training.eval_batches=1 --set model.overrides.num_hidden_layers=1 --data …
//!
//! FAKE_CUDA=90,100:2       devices: compute capability, and number of SMs
//! FAKE_CUDA_CHECK_ONLY=1   launches are checked and not run, and reads are zeros
//! ```
//!
//! Work runs as late as the API allows: when an event is synchronized, or another stream waits for
//! it. Reasons for errors are on standard error.

mod api;
mod context;
mod device;
mod launch;
mod maps;
mod memory;

use std::ffi::{CString, c_char, c_int};
use std::path::{Path, PathBuf};

use libloading::os::unix::{Library, RTLD_GLOBAL, RTLD_NOW};

pub use context::Fault;

/// Prints a line on standard error.
fn say(text: &str) {
    eprintln!("fake driver: {text}");
}

/// The driver in this process.
pub struct Driver {
    library: Library,
}

/// Loads the driver, and NVRTC of a toolkit or of a folder of wheels, for this process.
///
/// # Errors
/// A library that is missing or does not load.
///
/// # Safety
/// No other thread reads or writes environment variables, and no CUDA driver is loaded yet.
pub unsafe fn open(toolkit: &Path, devices: &str) -> Result<Driver, String> {
    let load = |path: &Path| {
        // SAFETY: loading these libraries only runs their initializers.
        unsafe { Library::open(Some(path), RTLD_NOW | RTLD_GLOBAL) }
            .map_err(|error| format!("{}: {error}", path.display()))
    };
    // SAFETY: guaranteed by the caller.
    unsafe {
        std::env::set_var("FAKE_CUDA", devices);
        std::env::set_var("CUDA_PATH", toolkit);
    }
    let library = load(&library())?;
    // NVRTC asks for its builtins by name.
    for name in ["libnvrtc-builtins.so.13.0", "libnvrtc.so.13"] {
        std::mem::forget(load(&toolkit.join("lib").join(name))?);
    }
    Ok(Driver { library })
}

/// File of the library, beside the tests that depend on it.
pub fn library() -> PathBuf {
    let test = std::env::current_exe().expect("a test has a path");
    test.with_file_name("libfake_cuda.so")
}

impl Driver {
    /// Injects a fault into a device.
    ///
    /// # Panics
    /// If there is no such device.
    pub fn inject(&self, device: usize, fault: &Fault) {
        let text = match fault {
            Fault::Lose(name) => format!("lose {name}"),
            Fault::Refuse(name) => format!("refuse {name}"),
            Fault::Stick(name) => format!("stick {name}"),
            Fault::Memory(limit) => format!("memory {limit}"),
        };
        let text = CString::new(text).expect("no NUL");
        type Inject = unsafe extern "C" fn(c_int, *const c_char) -> c_int;
        // SAFETY: the signature is the function's.
        let status = unsafe {
            let inject = self.library.get::<Inject>(b"fakeCudaInject\0").expect("the library has it");
            inject(device as c_int, text.as_ptr())
        };
        assert_eq!(status, 0, "{fault:?} on device {device}");
    }
}
