//! From a thread's sums to its part of the output.
//!
//! Chunks of some rows by 128 bytes go through shared memory, swizzled by 128 bytes as TMA expects them: 16 bytes `c` of row `r` lie at
//! `128 r + 16 (c xor r mod 8)`.

use cubecl::prelude::*;

use crate::gemm::problem::Problem;
use crate::gemm::schedule::Work;
use crate::ptx::tma::tma_store_wait_read;
use crate::view::Source;

/// How a tile's sums are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(in crate::gemm) struct Store {
    /// They go through TMA; otherwise each thread stores its elements.
    pub(in crate::gemm) tma: bool,
    /// They are unscaled f32 sums of one split of the contraction.
    pub(in crate::gemm) partial: bool,
    /// What the output holds is added.
    pub(in crate::gemm) accumulate: bool,
    /// Of the output.
    pub(in crate::gemm) dtype: Source,
}

impl Store {
    /// Columns of a chunk of the output: 128 bytes.
    pub(in crate::gemm) const fn chunk_cols(&self) -> usize {
        128 / self.dtype.size()
    }
}

/// Row and column of the output that a thread's first sum belongs to.
#[derive(CubeType, Clone, Copy)]
pub(in crate::gemm) struct Own {
    pub(in crate::gemm) row: u32,
    pub(in crate::gemm) col: u32,
}

/// Address of 16 bytes `piece` of a row of the chunk that lies at `chunk`, swizzled.
#[cube]
pub(in crate::gemm) fn swizzled(chunk: u32, row: u32, piece: u32) -> u32 {
    chunk + 128 * row + 16 * (piece ^ (row % 8))
}

/// Whether this thread speaks to TMA for the `threads` that store a chunk together.
#[cube]
pub(in crate::gemm) fn leads(#[comptime] threads: u32) -> bool {
    let thread = UNIT_POS % threads;
    thread == 0
}

/// Waits until TMA has read the last chunks: shared memory goes with the block.
#[cube]
pub(in crate::gemm) fn finish_stores(#[comptime] threads: u32) {
    if leads(threads) {
        tma_store_wait_read(0u32);
    }
}

/// Stores one element, if it is this tile's: rows of the output that TMA cannot write, being no multiple of 16 bytes apart, or ending
/// with a group.
#[cube]
pub(in crate::gemm) fn store_element<O: Float>(
    out: &mut Array<O>,
    value: f32,
    row: u32,
    col: u32,
    work: &Work,
    problem: &Problem,
) {
    if row >= work.row_begin && row < work.row_end && col < problem.n {
        let index = work.out0 + row * problem.n + col;
        out[index as usize] = O::cast_from(value);
    }
}
