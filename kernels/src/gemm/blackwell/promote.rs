//! Accumulates scaled sums of each 128 of the contraction in f32 registers.

use cubecl::prelude::*;

use super::epilogue::warp_row;
use super::plan::{ROWS, Scaling};
use super::{BlackwellConfig, STORERS};
use crate::gemm::problem::Problem;
use crate::gemm::tma::item::Item;
use crate::gemm::tma::ring::{Ring, RingPlace, advance};
use crate::gemm::tma::scales::step_factor;
use crate::ptx::barrier::{mbarrier_arrive, mbarrier_wait, named_barrier};
use crate::ptx::shared::{load_shared_words, store_shared};
use crate::ptx::tcgen05::{tcgen05_after_wait, tcgen05_before_signal, tmem_load};

/// Stages, and addresses of the mbarriers for sums.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Places {
    pub(super) ring: Ring,
    /// Address of the first mbarrier of finished sums.
    pub(super) ready: u32,
    /// Address of the first mbarrier of sums that have been read, so that their buffer is free.
    pub(super) read: u32,
}

/// Columns that a thread reads from tensor memory at once.
const READ: usize = 64;

/// Columns whose scales a thread has in registers at once.
const SCALED: usize = 4;

/// Accumulates this thread's row of a tile: the sums of each step of the item, scaled as they
/// become ready.
#[cube]
pub(super) fn add_steps(
    sums: &mut Array<f32>,
    tmem: u32,
    places: &Places,
    buffer: &mut RingPlace,
    problem: &Problem,
    item: &Item,
    #[comptime] config: BlackwellConfig,
) {
    #[unroll]
    for i in 0..comptime!(config.cols) {
        sums[i] = 0.0f32;
    }
    let mut part = Array::<f32>::new(comptime!(READ));
    let row = problem.row_of(item.work.row0 + warp_row() + UNIT_POS % 32, &item.work, 0usize);
    let row_b = problem.row_of(item.work.col0 + own_col(config), &item.work, 1usize);
    let [width_a, width_b] = comptime!(config.scale_widths);
    let mut held_a = Array::<f32>::new(comptime!(width_a as usize));
    let mut held_b = Array::<f32>::new(comptime!(width_b as usize));
    let mut step = item.step_begin;
    while step < item.step_end {
        let scale_a = step_factor(&mut held_a, problem, row, step, item, width_a, 0usize);
        // Shared by all columns, or the scale of the column that this thread loads for all threads.
        let scale_b = step_factor(&mut held_b, problem, row_b, step, item, width_b, 1usize);
        let scales_b = column_scales(places.ring.base, buffer.at, config);
        if comptime!(config.scaling == Scaling::EachStepByColumn) {
            // This buffer held the scales of two steps ago. Every thread read them before the last
            // step's barrier.
            store_shared(scales_b + 4 * own_col(config), scale_b);
            named_barrier(1u32.runtime(), comptime!(32 * STORERS as u32));
        }
        mbarrier_wait(places.ready + 8 * buffer.at, buffer.parity, true);
        tcgen05_after_wait();
        let lanes = tmem + buffer.at * comptime!(config.cols as u32) + (warp_row() << 16u32);
        #[unroll]
        for read in 0..comptime!(config.cols / READ) {
            let first = comptime!(read * READ);
            tmem_load(&mut part, lanes + comptime!(first as u32), comptime!(READ as u32));
            if comptime!(first + READ == config.cols) {
                tcgen05_before_signal();
                mbarrier_arrive(places.read + 8 * buffer.at);
            }
            add_part(sums, &part, scale_a, scale_b, scales_b, first, config);
        }
        advance(buffer, comptime!(config.buffers() as u32));
        step += 1;
    }
}

/// Column of the tile whose scale this thread loads.
#[cube]
fn own_col(#[comptime] config: BlackwellConfig) -> u32 {
    if comptime!(config.scaling == Scaling::EachStepByColumn) {
        // With fewer columns than threads, two threads load each column.
        UNIT_POS % comptime!(if config.cols < ROWS { config.cols as u32 } else { ROWS as u32 })
    } else {
        0u32.runtime()
    }
}

/// Address of the column scales for the step whose sums are in buffer `buffer`.
#[cube]
fn column_scales(base: u32, buffer: u32, #[comptime] config: BlackwellConfig) -> u32 {
    base + comptime!(config.column_scales_at() as u32) + buffer % 2 * comptime!(config.column_scales() as u32)
}

/// Adds a step's sums, which were read starting at tile column `first`.
#[cube]
fn add_part(
    sums: &mut Array<f32>,
    part: &Array<f32>,
    scale_a: f32,
    scale_b: f32,
    scales_b: u32,
    #[comptime] first: usize,
    #[comptime] config: BlackwellConfig,
) {
    let mut scales = Array::<f32>::new(comptime!(SCALED));
    #[unroll]
    for i in 0..comptime!(READ) {
        let factor = if comptime!(config.scaling == Scaling::EachStepByColumn) {
            if comptime!(i % SCALED == 0) {
                load_shared_words(
                    &mut scales,
                    0u32,
                    scales_b,
                    comptime!(4 * (first + i) as u32),
                    comptime!(SCALED as u32),
                );
            }
            scale_a * scales[comptime!(i % SCALED)]
        } else {
            scale_a * scale_b
        };
        let sum = comptime!(first + i);
        sums[sum] = fma(part[i], factor, sums[sum]);
    }
}
