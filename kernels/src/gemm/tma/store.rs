//! Stores of output tiles.
//!
//! Chunks of some rows by 128 bytes go through shared memory, in the 128-byte swizzle of TMA.
//! 16-byte piece `c` of row `r` is at `128 r + 16 (c xor r mod 8)`.

use cubecl::prelude::*;

use crate::element_type::ElementType;
use crate::gemm::grouped::Grouping;
use crate::gemm::problem::Problem;
use crate::gemm::schedule::Work;
use crate::gemm::tma::item::Item;
use crate::ptx::memory::store_from_shared;
use crate::ptx::tma::{tma_store, tma_store_none, tma_store_wait_read};

/// Store mode of a tile's sums.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(in crate::gemm) struct Store {
    /// Chunks go through shared memory: by TMA, or 16 bytes a thread where a group's rows end
    /// inside a chunk. Otherwise each thread stores its elements.
    pub(in crate::gemm) tma: bool,
    /// The tile has unscaled f32 sums of one split of the contraction.
    pub(in crate::gemm) partial: bool,
    /// Dtype of the output.
    pub(in crate::gemm) dtype: ElementType,
}

impl Store {
    /// Columns of a chunk of the output: 128 bytes.
    pub(in crate::gemm) const fn chunk_cols(&self) -> usize {
        128 / self.dtype.size()
    }
}

/// Output row and column of a thread's first sum.
#[derive(CubeType, Clone, Copy)]
pub(in crate::gemm) struct Own {
    pub(in crate::gemm) row: u32,
    pub(in crate::gemm) col: u32,
}

/// Swizzled address of 16-byte piece `piece` of a row in the chunk at `chunk`.
#[cube]
pub(in crate::gemm) fn swizzled(chunk: u32, row: u32, piece: u32) -> u32 {
    chunk + 128 * row + 16 * (piece ^ (row % 8))
}

/// Whether this thread issues TMA operations for the `threads` that store a chunk together.
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

/// Stores a chunk from shared memory at `at` to the output from `own` on, or to the item's part of
/// the split-K workspace. `by` is its rows and the threads that wrote it. All of these threads must
/// call this after a barrier and a fence.
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
        // TMA skips rows past the end of the output, but not rows of another group.
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

/// Stores the rows of a chunk that belong to the group, 16 bytes per thread at a time. The first
/// column and the row stride are multiples of 16 bytes. So no piece is partly before column 0 or
/// past the last column.
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

/// Waits until TMA has read the last chunks, because shared memory is freed with the block.
#[cube]
pub(in crate::gemm) fn finish_stores(#[comptime] threads: u32) {
    if leads(threads) {
        tma_store_wait_read(0u32);
    }
}
