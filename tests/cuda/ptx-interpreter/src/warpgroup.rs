//! Warpgroups: four warps that issue `wgmma` together, and their operations.

use std::sync::Arc;

use super::alu::Lanes;
use super::operand::ElementType;

/// Operation in flight.
#[derive(Clone, Debug)]
pub(crate) struct Issued {
    pub index: u64,
    pub n: usize,
    pub types: [ElementType; 2],
    pub negate: [bool; 2],
    /// Whether the rows of A and of B are contiguous in shared memory.
    pub transposed: [bool; 2],
    /// Key of the accumulators.
    pub d: u32,
    pub keep: bool,
    /// A `[64][k]` and B `[n][k]`, once read.
    pub operands: Option<(Vec<f32>, Vec<f32>)>,
    /// Elements of A, if they were in registers.
    pub a_registers: Option<Vec<f32>>,
    pub descriptors: [u64; 2],
}

/// Accumulators in flight: `[warp][register]`.
#[derive(Clone, Debug)]
pub(crate) struct Accumulators {
    pub registers: Arc<[u32]>,
    pub values: [Vec<Lanes>; 4],
    /// Last operation that adds to them, and the warps that have waited for it.
    pub last: u64,
    pub taken: [bool; 4],
}

/// Register of A in flight: its values when the operation was issued, and the operation.
#[derive(Clone, Debug)]
pub(crate) struct Held {
    pub register: u32,
    pub values: Lanes,
    pub until: u64,
}

/// State of a warpgroup.
#[derive(Clone, Debug, Default)]
pub(crate) struct Warpgroup {
    pub issued: u64,
    /// Warps that have reached the operation being issued.
    pub arrived: [bool; 4],
    pub instruction: Option<u32>,
    pub queue: Vec<Issued>,
    pub flight: Vec<Accumulators>,
    /// Accumulators, elements of A and descriptors of each warp for the operation being issued.
    pub gathered: [Option<Gathered>; 4],
}

#[derive(Clone, Debug)]
pub(crate) struct Gathered {
    pub accumulators: Vec<Lanes>,
    pub a: Option<Vec<Lanes>>,
    pub descriptors: [u64; 2],
    pub keep: bool,
    /// Previous name of the first accumulator in flight, if it has been copied since.
    pub renamed: Option<u32>,
}
