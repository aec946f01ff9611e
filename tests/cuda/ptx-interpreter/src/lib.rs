//! Interpreter of PTX that runs CUDA kernels without a GPU.
//!
//! It models the machine of the PTX ISA: warps, blocks, clusters, shared memory, barriers,
//! asynchronous copies and matrix instructions. The model is adversarial: asynchronous operations
//! complete as late as allowed, memory starts as poison, and undefined behaviour is an error.
//!
//! ```text
//! CubeCL launch → CUDA C++ → NVRTC → PTX → Kernel::parse → Kernel::run
//! ```
//!
//! With seed 0 every asynchronous operation completes at the last moment. Other seeds mix early and
//! late completion and interleave warps at random. Tensor cores add FP8 products in full, or with
//! the bits of an [`Accumulator`]. Time passes only while nothing else can run.
//!
//! Not modelled: caches and the order of plain memory accesses (each completes immediately),
//! `wgmma.fence`, and all instructions that [`Kernel::run`] reports as not modelled.

mod accumulator;
mod alu;
mod barrier;
mod bits;
mod collective;
mod compare;
mod convert;
mod copies;
mod decode;
mod error;
mod exec;
mod execute;
mod float;
mod flow;
mod instr;
mod matrix;
mod memory;
mod names;
mod operand;
mod pair;
mod reader;
mod run;
mod state;
mod stuck;
mod table;
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
