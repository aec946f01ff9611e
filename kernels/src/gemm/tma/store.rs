//! From a thread's sums to its part of the output.
//!
//! Chunks of some rows by 128 bytes go through shared memory, swizzled by 128 bytes as TMA expects them: 16 bytes `c` of row `r` lie at
//! `128 r + 16 (c xor r mod 8)`.

use cubecl::prelude::*;

use crate::gemm::grouped::Grouping;
use crate::gemm::problem::Problem;
use crate::gemm::schedule::Work;
use crate::gemm::tma::item::Item;
use crate::ptx::memory::store_from_shared;
use crate::ptx::tma::{tma_store, tma_store_none, tma_store_wait_read};
use crate::source::Source;

/// How a tile's sums are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(in crate::gemm) struct Store {
    /// Chunks go through shared memory: by TMA, or as 16 bytes a thread where a group's rows end in one. Otherwise each thread stores
    /// its elements.
    pub(in crate::gemm) tma: bool,
    /// They are unscaled f32 sums of one split of the contraction.
    pub(in crate::gemm) partial: bool,
    /// What the output holds is added.
    pub(in crate::gemm) accumulate: bool,
    /// The output's dtype.
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

/// Whether a chunk of `rows` rows from `row` on has rows to write.
#[cube]
pub(in crate::gemm) fn has_rows(row: u32, work: &Work, problem: &Problem, #[comptime] rows: u32) -> bool {
    if comptime!(problem.grouping == Some(Grouping::Rows)) {
        row < work.row_end && row + rows > work.row_begin
    } else {
        true.runtime()
    }
}

/// Has a chunk of so many rows, which so many threads have written to shared memory at `at`, go to the output from `own` on, or to the
/// item's part of the workspace of split-K. All of the threads must call it, after a barrier and a fence.
#[cube]
pub(in crate::gemm) fn store_chunk<O: Float>(
    map: &TensorMap<O, Tiled>,
    out: &mut Array<O>,
    at: u32,
    own: &Own,
    item: &Item,
    problem: &Problem,
    #[comptime] store: Store,
    #[comptime] by: [u32; 2],
) {
    let [rows, threads] = comptime!(by);
    let work = &item.work;
    if comptime!(problem.grouping == Some(Grouping::Rows)) {
        // TMA leaves out what lies past the last row of the output, but not what is another group's.
        let ends_inside = own.row + rows <= work.row_end || work.row_end == problem.m;
        if own.row >= work.row_begin && ends_inside {
            if leads(threads) {
                tma_store(map, at, own.col, own.row, work.matrix);
            }
        } else {
            store_pieces(out, at, own, work, problem, store, by);
            if leads(threads) {
                tma_store_none();
            }
        }
    } else if leads(threads) {
        tma_store(map, at, own.col, item.above + own.row, work.matrix);
    }
}

/// Stores those rows of a chunk that are the group's, 16 bytes a thread at a time. Their first column, like the distance of rows, is a
/// multiple of 16 bytes, so that no piece is in part before column 0 or past the last.
#[cube]
fn store_pieces<O: Float>(
    out: &mut Array<O>,
    at: u32,
    own: &Own,
    work: &Work,
    problem: &Problem,
    #[comptime] store: Store,
    #[comptime] by: [u32; 2],
) {
    let [rows, threads] = comptime!(by);
    for i in 0..comptime!(8 * rows / threads) {
        let number = i * threads + UNIT_POS % threads;
        let (row, piece) = (number / 8, number % 8);
        let (to_row, to_col) = (own.row + row, own.col + piece * comptime!(store.chunk_cols() as u32 / 8));
        if to_row >= work.row_begin && to_row < work.row_end && to_col < problem.n {
            store_from_shared(out, to_row * problem.n + to_col, swizzled(at, row, piece));
        }
    }
}

/// Waits until TMA has read the last chunks: shared memory goes with the block.
#[cube]
pub(in crate::gemm) fn finish_stores(#[comptime] threads: u32) {
    if leads(threads) {
        tma_store_wait_read(0u32);
    }
}
