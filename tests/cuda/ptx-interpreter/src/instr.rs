//! Decoded instructions. Operands are indices of registers and predicates; constants have their own
//! registers.

use std::sync::Arc;

use super::alu::Alu;
use super::compare::Compare;
use super::convert::Convert;
use super::operand::{Addr, ElementType, Guard, Space};

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
    Ballot,
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
    Load { d: Vec<u32>, address: Addr, stride: u32, size: [usize; 2], column: bool, ty: ElementType },
    Store { s: Vec<u32>, address: Addr, stride: u32, size: [usize; 2], column: bool, ty: ElementType },
    Mma { d: Vec<u32>, a: Vec<u32>, b: Vec<u32>, c: Vec<u32>, ty: ElementType, shape: [usize; 3] },
}

/// Tensor core operation of one thread, or a fence around it.
#[derive(Debug)]
pub(crate) enum TensorOp {
    /// `fence::before_thread_sync` and `fence::after_thread_sync`.
    Before,
    After,
    /// Arrives at one mbarrier, or at the mbarriers with its offset in every block of the mask in
    /// this register.
    Commit {
        barrier: Addr,
        multicast: Option<u32>,
    },
    /// `cp.32x128b.warpx4`, with the descriptor's register.
    Copy {
        to: Addr,
        from: u32,
    },
    /// Registers of the descriptors; addresses of the scales of A and B.
    Mma {
        d: Addr,
        a: u32,
        b: u32,
        instruction: u32,
        scales: Option<[Addr; 2]>,
        keep: Guard,
    },
}

/// Warp-wide operation on tensor memory.
#[derive(Debug)]
pub(crate) enum TensorWarpOp {
    Alloc {
        slot: Addr,
        columns: u32,
    },
    Dealloc {
        address: u32,
        columns: u32,
    },
    Relinquish,
    /// `ld.32x32b`.
    Load {
        d: Vec<u32>,
        address: Addr,
    },
    Wait,
}

#[derive(Debug)]
pub(crate) enum Op {
    Nop,
    Alu(Alu, [u32; 4]),
    Move {
        d: u32,
        a: u32,
    },
    Lop3 {
        d: u32,
        s: [u32; 3],
        table: u32,
    },
    Bfi {
        d: u32,
        s: [u32; 4],
        bits: u64,
    },
    Convert {
        convert: Convert,
        d: u32,
        a: u32,
        b: u32,
    },
    Setp {
        compare: Compare,
        d: u32,
        d2: Option<u32>,
        a: u32,
        b: u32,
        combine: Option<(Logic, Guard)>,
    },
    Predicate {
        logic: Logic,
        d: u32,
        a: Guard,
        b: Guard,
    },
    Selp {
        d: u32,
        a: u32,
        b: u32,
        p: Guard,
    },
    Pack {
        d: u32,
        parts: Vec<u32>,
        bits: u32,
    },
    Unpack {
        parts: Vec<u32>,
        a: u32,
        bits: u32,
    },
    Load {
        d: Vec<u32>,
        address: Addr,
        bytes: u32,
        signed: bool,
    },
    Store {
        s: Vec<u32>,
        address: Addr,
        bytes: u32,
    },
    Atomic {
        op: AtomicOp,
        ty: &'static str,
        d: u32,
        address: Addr,
        a: u32,
        b: u32,
    },
    Branch {
        target: u32,
    },
    Exit,
    Trap,
    /// `%globaltimer`, from bit `from` on.
    Timer {
        d: u32,
        from: u32,
        bits: u32,
    },
    ToShared {
        d: u32,
        a: u32,
        to_generic: bool,
    },
    Isspacep {
        d: u32,
        a: u32,
        space: Space,
    },

    // Warp.
    SyncWarp {
        mask: u32,
    },
    Shuffle {
        kind: Shuffle,
        d: u32,
        p: Option<u32>,
        a: u32,
        b: u32,
        c: u32,
        mask: u32,
    },
    Vote {
        kind: Vote,
        d: u32,
        p: Guard,
        mask: u32,
    },
    Match {
        d: u32,
        p: Option<u32>,
        a: u32,
        mask: u32,
        all: bool,
    },
    Redux {
        op: AtomicOp,
        signed: bool,
        d: u32,
        a: u32,
        mask: u32,
    },
    Elect {
        d: u32,
        p: u32,
        mask: u32,
    },
    Activemask {
        d: u32,
    },
    Ldmatrix {
        d: Vec<u32>,
        address: Addr,
        transposed: bool,
    },
    Stmatrix {
        s: Vec<u32>,
        address: Addr,
        transposed: bool,
    },
    Mma(Box<Mma>),
    Wmma(Box<Wmma>),

    // Block and cluster.
    Bar {
        id: u32,
        count: Option<u32>,
        wait: bool,
        aligned: bool,
    },
    ClusterArrive,
    ClusterWait,
    Mapa {
        d: u32,
        a: u32,
        rank: u32,
        generic: bool,
    },
    Mbarrier {
        op: Barrier,
        d: u32,
        address: Addr,
        value: Option<u32>,
    },
    MbarrierWait {
        p: u32,
        address: Addr,
        value: u32,
        parity: bool,
        may_block: bool,
    },
    FenceProxy,

    // Asynchronous copies.
    CpAsync {
        to: Addr,
        from: Addr,
        size: u32,
        source_size: Option<u32>,
    },
    CpAsyncCommit,
    CpAsyncWait {
        pending: u32,
    },
    CpAsyncArrive {
        address: Addr,
        increment: bool,
    },
    /// With `pair` the mbarrier may be in the other block of the pair (`.cta_group::2`).
    BulkLoad {
        to: Addr,
        from: Bulk,
        barrier: Addr,
        multicast: Option<u32>,
        pair: bool,
    },
    BulkStore {
        to: Bulk,
        from: Addr,
        add: bool,
    },
    BulkCommit,
    BulkWait {
        pending: u32,
    },

    // Warpgroup.
    Wgmma(Box<Wgmma>),
    WgmmaFence,
    WgmmaCommit,
    WgmmaWait {
        pending: u32,
    },

    // Tensor memory.
    Tensor(Box<TensorOp>),
    TensorWarp(TensorWarpOp),

    /// Not modelled: an error when it is executed.
    Unknown,
}

/// Operation with an optional predicate.
#[derive(Debug)]
pub(crate) struct Instr {
    pub guard: Option<Guard>,
    pub op: Op,
}
