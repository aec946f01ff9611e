//! CUDA without a GPU. A CubeCL runtime generates each kernel's C++ on the real launch path
//! ([`device`]); it runs nothing, or interprets the PTX ([`device::execute`]). NVRTC comes from a
//! folder of wheels or a toolkit ([`nvrtc`]), and the machine code is analyzed ([`sass`]).
//!
//! ```no_run
//! use codegen::device::{Execution, GenerateCuda, OfflineDevice, execute};
//! use cubecl_core::Runtime;
//!
//! // None without FLOAT8_CUDA_TOOLS.
//! if let Some(_running) = execute(Execution { seed: 0 }) {
//!     let client = GenerateCuda::client(&OfflineDevice::new(90));
//!     let x = client.create_from_slice(&[0; 64]);
//!     // … launches …
//!     let bytes = client.read_one(x).expect("faults of kernels are errors here");
//! }
//! ```

mod compiler;
pub mod device;
pub mod expected;
pub mod fault;
mod launch;
mod memory;
pub mod nvrtc;
pub mod parallel;
pub mod ptxas;
pub mod sass;
mod server;
mod state;
pub mod variants;
