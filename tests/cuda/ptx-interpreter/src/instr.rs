//! Parts of decoded instructions.

use std::sync::Arc;

use super::operand::{Addr, ElementType, Guard};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Logic {
    And,
    Or,
    Xor,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum AtomicOp {
    Add,
    Min,
    Max,
    And,
    Or,
    Xor,
    Exchange,
    Cas,
    Increment,
    Decrement,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Shuffle {
    Up,
    Down,
    Butterfly,
    Index,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Vote {
    All,
    Any,
    Uniform,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Barrier {
    Init,
    Invalidate,
    ExpectTx,
    CompleteTx,
    Arrive { expect: bool, drop: bool },
}

/// Matrix product of a warp: `d = a · b + c`.
#[derive(Debug)]
pub(crate) struct Mma {
    pub k: usize,
    pub types: [ElementType; 2],
    pub d: Vec<u32>,
    pub a: Vec<u32>,
    pub b: Vec<u32>,
    pub c: Vec<u32>,
    /// Location of the scales of `a` and `b`: register, byte, and thread of a quad.
    pub scales: Option<[(u32, u32, u32); 2]>,
    /// Sums and results are f16.
    pub half: bool,
}

/// Matrix product of a warpgroup.
#[derive(Debug)]
pub(crate) struct Wgmma {
    pub n: usize,
    pub types: [ElementType; 2],
    pub d: Arc<[u32]>,
    /// One register with a descriptor, or four with elements.
    pub a: Vec<u32>,
    pub b: u32,
    pub scale_d: Option<Guard>,
    pub negate: [bool; 2],
    /// Operands that are M- or N-major in shared memory.
    pub transposed: [bool; 2],
}

/// Global operand of a bulk copy.
#[derive(Debug)]
pub(crate) enum Bulk {
    /// Registers of the tensor map's generic address and of the coordinates, innermost first.
    Tensor { map: u32, coords: Vec<u32> },
    /// Address and size of plain bytes.
    Bytes { address: Addr, size: u32 },
}

#[derive(Debug)]
pub(crate) enum Wmma {
    /// A load, or a store, of a fragment.
    Move {
        registers: Vec<u32>,
        address: Addr,
        stride: u32,
        size: [usize; 2],
        column: bool,
        ty: ElementType,
        store: bool,
    },
    Mma {
        d: Vec<u32>,
        a: Vec<u32>,
        b: Vec<u32>,
        c: Vec<u32>,
        ty: ElementType,
        shape: [usize; 3],
    },
}
