//! Loads block scales from device memory to the registers of consumers.
//!
//! In device memory a row's scales are contiguous along the contraction. So a thread loads a row's
//! scales for two or four blocks at once, keeps them, and writes one to each stage. Past the last
//! row or column the scale is arbitrary.

use cubecl::prelude::*;

use super::plan::{Promotion, mma_cols};
use super::rank::group_origin;
use super::{GROUP, HopperConfig};
use crate::gemm::problem::Problem;
use crate::gemm::tma::item::Item;
use crate::gemm::tma::ring::{Ring, RingPlace, advance, stage_scales};
use crate::gemm::tma::scales::{loads_at, pick};
use crate::ptx::barrier::mbarrier_arrive;
use crate::ptx::shared::{load_shared, load_shared_words, store_shared};

/// Threads that fetch scales: the producer's warps except the first.
pub(super) const SCALE_THREADS: u32 = 96;

impl HopperConfig {
    /// Rows of operand 0 (A) or 1 (B) whose scales a stage has. For B, one per product if its
    /// columns share a scale.
    pub(super) const fn scale_lines(&self, side: usize) -> usize {
        match (side, self.promotion) {
            (0, _) => self.tile.rows,
            (_, Promotion::EachStepByColumn) => self.tile.cols,
            _ => self.tile.cols / mma_cols(self.tile, self.promotion),
        }
    }

    /// Maximum rows that a thread fetches scales for.
    const fn lines_per_thread(&self, side: usize) -> u32 {
        (self.scale_lines(side) as u32).div_ceil(SCALE_THREADS)
    }

    /// Scales that such a thread holds.
    const fn fetched(&self, side: usize) -> usize {
        (self.lines_per_thread(side) * self.scale_widths[side]) as usize
    }

    /// Rows of the operand between two of these rows.
    const fn lines_apart(&self, side: usize) -> u32 {
        let rows = if side == 0 { self.tile.rows } else { self.tile.cols };
        (rows / self.scale_lines(side)) as u32
    }
}

/// Writes the scales of an item's stages to shared memory, as stages become free. Issues loads
/// before waiting for a stage.
#[cube]
pub(super) fn fetch_scales(
    problem: &Problem,
    ring: &Ring,
    place: &mut RingPlace,
    item: &Item,
    #[comptime] config: HopperConfig,
) {
    let mut of_a = Array::<f32>::new(comptime!(config.fetched(0)));
    let mut of_b = Array::<f32>::new(comptime!(config.fetched(1)));
    let mut step = item.step_begin;
    while step < item.step_end {
        load_lines(problem, &mut of_a, item, step, config, 0usize);
        load_lines(problem, &mut of_b, item, step, config, 1usize);
        ring.wait_empty(place);
        let at = stage_scales(ring.base, place.at, comptime!(config.layout()));
        store_lines(&of_a, at, step, config, 0usize);
        store_lines(&of_b, at + comptime!(4 * config.scale_lines(0) as u32), step, config, 1usize);
        mbarrier_arrive(ring.full(place.at));
        advance(place, comptime!(config.stages as u32));
        step += 1;
    }
}

/// First row that this thread fetches scales for. The others are [`SCALE_THREADS`] apart.
#[cube]
fn first_line() -> u32 {
    (UNIT_POS + SCALE_THREADS) % GROUP
}

/// Loads this thread's scales if it does not hold the ones for this step.
#[cube]
fn load_lines(
    problem: &Problem,
    to: &mut Array<f32>,
    item: &Item,
    step: u32,
    #[comptime] config: HopperConfig,
    #[comptime] side: usize,
) {
    let width = comptime!(config.scale_widths[side]);
    if loads_at(step, item, width) {
        let block = step / width * width;
        #[unroll]
        for i in 0..comptime!(config.lines_per_thread(side)) {
            let line = first_line() + comptime!(i * SCALE_THREADS);
            if line < comptime!(config.scale_lines(side) as u32) {
                let first = if comptime!(side == 0) { item.work.row0 } else { item.work.col0 };
                let row = problem.row_of(first + line * comptime!(config.lines_apart(side)), &item.work, side);
                problem.load_factors(to, comptime!(i * width), row, block, width, side);
            }
        }
    }
}

/// Writes this thread's scales for the step's block to a stage.
#[cube]
fn store_lines(from: &Array<f32>, to: u32, step: u32, #[comptime] config: HopperConfig, #[comptime] side: usize) {
    let width = comptime!(config.scale_widths[side]);
    let which = step % width;
    #[unroll]
    for i in 0..comptime!(config.lines_per_thread(side)) {
        let line = first_line() + comptime!(i * SCALE_THREADS);
        if line < comptime!(config.scale_lines(side) as u32) {
            let scale = pick(from, which, comptime!(i * width), width);
            store_shared(to + 4 * line, scale);
        }
    }
}

/// Loads the scales of this thread's two rows from a stage.
#[cube]
pub(super) fn load_scales_a(to: &mut Array<f32>, base: u32, stage: u32, #[comptime] config: HopperConfig) {
    let (group_row, _) = group_origin(config);
    let row = group_row + UNIT_POS % GROUP / 32 * 16 + UNIT_POS % 32 / 4;
    let scales = stage_scales(base, stage, comptime!(config.layout()));
    to[0] = load_shared(scales + 4 * row);
    to[1] = load_shared(scales + 4 * (row + 8));
}

/// Address of this thread's first scale of B for product `p` of a stage.
#[cube]
pub(super) fn scales_b_at(base: u32, stage: u32, #[comptime] p: u32, #[comptime] config: HopperConfig) -> u32 {
    let (_, group_col) = group_origin(config);
    let col = group_col + comptime!(p * mma_cols(config.tile, config.promotion) as u32);
    let scales = stage_scales(base, stage, comptime!(config.layout())) + comptime!(4 * config.tile.rows as u32);
    let line = scales + 4 * (col / comptime!(config.lines_apart(1)));
    if comptime!(config.promotion == Promotion::EachStepByColumn) { line + 8 * (UNIT_POS % 4) } else { line }
}

/// Loads the scales of B for this thread's two columns of the `j`th 8, of a product whose first
/// scales are at `at`.
#[cube]
pub(super) fn load_scales_b(to: &mut Array<f32>, at: u32, #[comptime] j: u32) {
    load_shared_words(to, 0u32, at, comptime!(32 * j), 2u32);
}
