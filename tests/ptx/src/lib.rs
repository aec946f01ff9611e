//! An interpreter of PTX, so that CUDA kernels run without a GPU.
//!
//! It is a model of the machine that the PTX ISA describes, warps, blocks, clusters, shared memory, barriers,
//! asynchronous copies and matrix instructions, and an adversarial one: what may happen late happens late, memory
//! starts as poison, and what is undefined is an error.
//!
//! ```text
//! CubeCL launch → CUDA C++ → NVRTC → PTX → Kernel::parse → Kernel::run
//! ```
//!
//! Seed 0 lets everything asynchronous happen at the last moment; other seeds mix early and late and interleave warps
//! at random. Not modelled: caches and the order of plain memory accesses (each is done at once), `wgmma.fence`, the
//! tensor cores' rounding of sums, time, and whatever [`Kernel::run`] says it does not know.

mod alu;
mod barrier;
mod bits;
mod collective;
mod compare;
mod convert;
mod copies;
mod decode;
mod decode_async;
mod decode_op;
mod decode_sync;
mod decode_tensor;
mod exec;
mod execute;
mod instr;
mod memory;
mod run;
mod state;
mod tcgen05;
mod text;
mod tma;
mod wgmma;

pub use decode::Kernel;
pub use memory::Buffer;
pub use run::{Arg, Launch};
pub use tma::{TensorFloat, TensorMap};
