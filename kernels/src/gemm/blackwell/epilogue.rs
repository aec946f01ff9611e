//! Epilogue of a tile: scales, bias, one rounding, and the store.
//!
//! Each thread has one row. Chunks of 32 rows by 128 bytes go through shared memory
//! ([`tma::store`](crate::gemm::tma::store)).

use cubecl::prelude::*;

use super::{BlackwellConfig, CHUNK, WARP_ROWS};
use crate::Granularity;
use crate::element_type::ElementType;
use crate::gemm::problem::Problem;
use crate::gemm::tma::item::Item;
use crate::gemm::tma::store::{Own, has_rows, leads, store_chunk, swizzled};
use crate::ptx::barrier::fence_proxy_async;
use crate::ptx::shared::store_shared_quad;
use crate::ptx::tcgen05::tmem_load;
use crate::ptx::tma::tma_store_wait_read;
use crate::ptx::wgmma::pack_half;

/// First of this warp's 32 rows in a tile. Also the first lane of tensor memory that it may read.
#[cube]
pub(super) fn warp_row() -> u32 {
    UNIT_POS / 32 % 4 * comptime!(WARP_ROWS as u32)
}

/// State of a warp that stores tiles: its progress, and its part of the current tile.
#[derive(CubeType)]
pub(super) struct Storer {
    /// Address of the block's shared memory.
    base: u32,
    /// Chunks that the warp has stored.
    chunks: u32,
    /// The warp's first row of the output.
    first_row: u32,
    /// Columns to store. Zero if the tile's rows end before the warp's.
    cols: u32,
    /// Inverse scale of A for this thread's row.
    scale_a: f32,
}

#[cube]
impl Storer {
    /// State before the first tile.
    pub(super) fn new(base: u32) -> Self {
        let zero = 0u32.runtime();
        Storer { base, chunks: zero, first_row: zero, cols: zero, scale_a: 1.0f32.runtime() }
    }

    /// Starts the next tile.
    pub(super) fn begin(&mut self, problem: &Problem, item: &Item, #[comptime] config: BlackwellConfig) {
        self.first_row = item.work.row0 + warp_row();
        let cols = comptime!(config.cols as u32).runtime();
        let has_rows = self.first_row < item.work.row_end
            && has_rows(self.first_row, &item.work, problem, comptime!(WARP_ROWS as u32));
        self.cols = if has_rows { min(cols, problem.n - item.work.col0) } else { 0u32.runtime() };
        self.scale_a = problem.line_factor(self.first_row + UNIT_POS % 32, &item.work, 0u32.runtime(), 0usize);
    }
}

/// Stores this warp's rows of a tile whose sums start at column `sums` of tensor memory.
#[cube]
pub(super) fn store_tile<O: Float>(
    sums: u32,
    storer: &mut Storer,
    out_map: &mut ComptimeOption<TensorMap<O, Tiled>>,
    out: &mut Array<O>,
    problem: &Problem,
    item: &Item,
    #[comptime] config: BlackwellConfig,
) {
    let chunk_cols = comptime!(config.store.chunk_cols() as u32);
    let lanes = sums + (warp_row() << 16u32);
    let mut values = Array::<f32>::new(comptime!(config.store.chunk_cols()));
    let mut at = 0u32.runtime();
    while at < storer.cols {
        tmem_load(&mut values, lanes + at, chunk_cols);
        store_columns::<O>(&mut values, at, storer, out_map, out, problem, item, config);
        at += chunk_cols;
    }
}

/// Stores this warp's rows of a tile whose sums are in registers, one row per thread.
#[cube]
pub(super) fn store_sums<O: Float>(
    sums: &Array<f32>,
    storer: &mut Storer,
    out_map: &mut ComptimeOption<TensorMap<O, Tiled>>,
    out: &mut Array<O>,
    problem: &Problem,
    item: &Item,
    #[comptime] config: BlackwellConfig,
) {
    let chunk_cols = comptime!(config.store.chunk_cols());
    let mut values = Array::<f32>::new(chunk_cols);
    #[unroll]
    for chunk in 0..comptime!(config.cols / chunk_cols) {
        let at = comptime!((chunk * chunk_cols) as u32).runtime();
        if at < storer.cols {
            #[unroll]
            for i in 0..chunk_cols {
                values[i] = sums[comptime!(chunk * chunk_cols + i)];
            }
            store_columns::<O>(&mut values, at, storer, out_map, out, problem, item, config);
        }
    }
}

/// Scales a chunk of the warp's rows that starts at column `at` of the tile. Adds the bias
/// and stores the result.
#[cube]
fn store_columns<O: Float>(
    values: &mut Array<f32>,
    at: u32,
    storer: &mut Storer,
    out_map: &mut ComptimeOption<TensorMap<O, Tiled>>,
    out: &mut Array<O>,
    problem: &Problem,
    item: &Item,
    #[comptime] config: BlackwellConfig,
) {
    let own = Own { row: storer.first_row + UNIT_POS % 32, col: item.work.col0 + at };
    if comptime!(!config.store.partial) {
        finish(values, storer.scale_a, problem, own.col, item, config);
    }
    #[comptime]
    match out_map {
        ComptimeOption::Some(map) => {
            let to = stage_chunk(values, storer, config);
            let first = Own { row: storer.first_row, col: own.col };
            store_chunk(map, out, to, &first, item, problem, config.store, comptime!([WARP_ROWS as u32, 32u32]));
            storer.chunks += 1;
        }
        ComptimeOption::None =>
        {
            #[unroll]
            for i in 0..comptime!(config.store.chunk_cols()) {
                problem.put::<O>(out, values[i], own.row, own.col + comptime!(i as u32), &item.work);
            }
        }
    }
}

/// `sum · (inv_scale_a · inv_scale_b) + bias` for a chunk of this thread's row that starts at
/// column `col`. Each lane loads the scale and bias of one of 32 columns and shares them by
/// shuffles.
#[cube]
fn finish(
    values: &mut Array<f32>,
    scale_a: f32,
    problem: &Problem,
    col: u32,
    item: &Item,
    #[comptime] config: BlackwellConfig,
) {
    let by_col = comptime!(matches!(problem.granularities[1], Granularity::Row));
    #[unroll]
    for group in 0..comptime!(config.store.chunk_cols() / 32) {
        let own = col + comptime!(32 * group as u32) + UNIT_POS % 32;
        let scale_own = problem.line_factor(own, &item.work, 0u32.runtime(), 1usize);
        let bias_own = problem.bias.at(min(own, problem.n - 1));
        #[unroll]
        for i in 0..32usize {
            let scale_b = if comptime!(by_col) { plane_shuffle(scale_own, comptime!(i as u32)) } else { scale_own };
            let bias = if comptime!(problem.bias.values.is_some()) {
                plane_shuffle(bias_own, comptime!(i as u32))
            } else {
                f32::new(0.0)
            };
            let place = comptime!(32 * group + i);
            values[place] = problem.finish(values[place], scale_a * scale_b, bias, item.step_begin < item.step_end);
        }
    }
}

/// Writes the warp's next chunk to shared memory, visible to TMA and all threads of the warp.
/// Returns its address.
#[cube]
fn stage_chunk(values: &Array<f32>, storer: &Storer, #[comptime] config: BlackwellConfig) -> u32 {
    let chunks = comptime!(config.chunks as u32);
    let slot = warp_row() / comptime!(WARP_ROWS as u32) * chunks + storer.chunks % chunks;
    let to = storer.base + comptime!(config.layout().chunks_at() as u32) + slot * comptime!(CHUNK as u32);
    if leads(32u32) {
        // The last store from these bytes has finished reading them.
        tma_store_wait_read(comptime!(chunks - 1));
    }
    sync_plane();
    stage(values, to, comptime!(config.store.dtype));
    fence_proxy_async();
    sync_plane();
    to
}

/// Writes this thread's row of a chunk.
#[cube]
fn stage(values: &Array<f32>, to: u32, #[comptime] dtype: ElementType) {
    let row = UNIT_POS % 32;
    #[unroll]
    for piece in 0..8u32 {
        let address = swizzled(to, row, piece);
        let mut words = Array::<u32>::new(4usize);
        #[unroll]
        for i in 0..4u32 {
            let word = comptime!(4 * piece + i) as usize;
            words[i as usize] = if comptime!(dtype == ElementType::F32) {
                u32::reinterpret(values[word])
            } else {
                pack_half(values[2 * word], values[2 * word + 1], comptime!(dtype == ElementType::Bf16))
            };
        }
        store_shared_quad(address, &words);
    }
}
