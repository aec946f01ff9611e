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
//! at random. Tensor cores add FP8 products in full, or with as few bits as an [`Accumulator`] says. Time passes only while
//! nothing else can go on. Not modelled: caches and the order of plain memory accesses (each is done at once),
//! `wgmma.fence`, and whatever [`Kernel::run`] says it does not know.

mod accumulator;
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
mod error;
mod exec;
mod execute;
mod float;
mod flow;
mod instr;
mod memory;
mod operand;
mod pair;
mod run;
mod state;
mod stuck;
mod tcgen05;
mod tensor_memory;
mod text;
mod tma;
mod warpgroup;
mod wgmma;

pub use accumulator::{Accumulator, Rounding};
pub use decode::Kernel;
pub use error::Error;
pub use memory::Buffer;
pub use run::{Arg, Launch};
pub use tma::{TensorFloat, TensorMap};

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
