//! Scores of a warp: products, weights and slopes in the registers of its lanes.

use cubecl::prelude::*;

use super::{MmaPlan, ROW};
use crate::attention::launch::{Operands, Stat};
use crate::attention::problem::{Item, Scores};
use crate::attention::{HIDDEN, NOTHING, TILE};
use crate::ptx::cvt::exp2_approx;
use crate::ptx::mma::{load_matrices, load_matrices_transposed, mma_half};
use crate::ptx::shared::load_shared_words;
use crate::ptx::wgmma::pack_half;

const LOG2E: f32 = core::f32::consts::LOG2_E;

/// Operation on the lanes of a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum LaneFold {
    Max,
    Sum,
}

/// `count` zeros.
#[cube]
pub(in crate::attention) fn zeros(#[comptime] count: u32) -> Array<f32> {
    let mut zeros = Array::<f32>::new(comptime!(count as usize));
    #[unroll]
    for i in 0..count {
        zeros[i as usize] = 0.0f32;
    }
    zeros
}

/// Place of a lane.
#[derive(CubeType, Clone, Copy)]
pub(in crate::attention) struct Lanes {
    /// First row of the warp.
    warp_row: u32,
    /// First row and column of the lane's scores.
    pub(in crate::attention) row: u32,
    pub(in crate::attention) col: u32,
    /// Byte offset of the warp's rows.
    warp: u32,
    /// Byte offset of the lane's row of fragments: 16 rows by two pieces, lanes down the rows.
    down: u32,
    /// The same, with lanes of eight rows across both pieces.
    across: u32,
}

/// Columns of a step.
#[derive(CubeType, Clone, Copy)]
pub(in crate::attention) struct Step {
    pub(in crate::attention) item: Item,
    pub(in crate::attention) col0: u32,
    pub(in crate::attention) class: u32,
}

/// Statistics of the queries of a lane's scores, if the role has any. `held` has lse in bits, shared
/// memory has it in nats.
#[derive(CubeType)]
pub(in crate::attention) struct Stats {
    held: Sequence<Stat>,
    /// Address of the lane's first lse, if columns are queries whose statistics are in shared
    /// memory. All δ follow all lse.
    shared: u32,
    #[cube(comptime)]
    in_shared: bool,
}

#[cube]
impl Stats {
    /// Statistics in shared memory, of the columns of a step.
    pub(in crate::attention) fn in_shared(first: u32, lanes: &Lanes) -> Stats {
        Stats { held: Sequence::<Stat>::new(), shared: first + 4 * lanes.col, in_shared: true }
    }

    /// No statistics, for forward.
    pub(in crate::attention) fn none() -> Stats {
        Stats { held: Sequence::<Stat>::new(), shared: 0u32.runtime(), in_shared: false }
    }

    /// lse, or δ, of score `i`, for ascending `i`. `pair` holds both columns of a lane in a tile of
    /// eight, which every fourth `i` reads.
    fn value(
        &self,
        pair: &mut Array<f32>,
        #[comptime] i: u32,
        #[comptime] is_lse: bool,
        #[comptime] plan: MmaPlan,
    ) -> f32 {
        if comptime!(self.in_shared) {
            if comptime!(i.is_multiple_of(4)) {
                load_shared_words(
                    pair,
                    0u32,
                    self.shared,
                    comptime!(8 * i + if is_lse { 0 } else { 4 * plan.cols }),
                    2u32,
                );
            }
            let value = pair[comptime!((i % 2) as usize)];
            if comptime!(is_lse) { value * LOG2E } else { value }
        } else {
            let stat = self.held.index(comptime!(plan.stat(i)));
            if comptime!(is_lse) { stat.lse } else { stat.delta }
        }
    }
}

#[cube]
impl Step {
    /// Columns of an item's step from `col0` on.
    pub(in crate::attention) fn new(scores: &Scores, item: &Item, col0: u32, #[comptime] plan: MmaPlan) -> Step {
        let size = comptime!([plan.rows(), plan.cols]);
        Step { item: *item, col0, class: scores.class(item, col0, size, comptime!(plan.role.rows_are_keys())) }
    }
}

#[cube]
impl Lanes {
    pub(in crate::attention) fn new(row0: u32, #[comptime] plan: MmaPlan) -> Lanes {
        let (lane, warp) = (UNIT_POS % 32, UNIT_POS / 32 % plan.warps * comptime!(16 * plan.products));
        let swizzle = lane % 8;
        Lanes {
            warp_row: row0 + warp,
            row: row0 + warp + lane / 4,
            col: lane % 4 * 2,
            warp: warp * ROW,
            down: lane % 16 * ROW + ((lane / 16) ^ swizzle) * 16,
            across: (lane % 8 + lane / 16 * 8) * ROW + ((lane / 8 % 2) ^ swizzle) * 16,
        }
    }

    /// Statistics from device memory, or none.
    pub(in crate::attention) fn stats(
        &self,
        operands: &Operands,
        scores: &Scores,
        place: &Item,
        col0: u32,
        #[comptime] wanted: bool,
        #[comptime] plan: MmaPlan,
    ) -> Stats {
        let mut stats = Sequence::<Stat>::new();
        if comptime!(wanted) {
            #[unroll]
            for i in 0..comptime!(if plan.role.rows_are_keys() { plan.cols / 4 } else { plan.lane_rows() }) {
                let query = if comptime!(plan.role.rows_are_keys()) {
                    col0 + self.col + comptime!(i / 2 * 8 + i % 2)
                } else {
                    self.row + comptime!(8 * i)
                };
                let stat = operands.stat(scores, place, query);
                stats.push(Stat { lse: stat.lse * LOG2E, delta: stat.delta });
            }
        }
        Stats { held: stats, shared: 0u32.runtime(), in_shared: false }
    }

    /// Replaces products by scores, and for backward by weights, and the products of dy by slopes.
    pub(in crate::attention) fn score(
        &self,
        weights: &mut Array<f32>,
        slopes: &mut Array<f32>,
        stats: &Stats,
        scores: &Scores,
        step: &Step,
        #[comptime] plan: MmaPlan,
    ) {
        let of_keys = comptime!(plan.role.rows_are_keys());
        let (row, col) = (self.row, step.col0 + self.col);
        let mut pair = Array::<f32>::new(2usize);
        #[unroll]
        for i in 0..comptime!(plan.scores()) {
            let [down, across] = comptime!(plan.place(i));
            let (query, key) = if comptime!(of_keys) { (col + across, row + down) } else { (row + down, col + across) };
            let score = scores.score(weights[i as usize], &step.item, query, key);
            weights[i as usize] = score.value;
            if comptime!(plan.role.sums_slopes()) {
                let delta = stats.value(&mut pair, i, false, plan);
                slopes[i as usize] = (slopes[i as usize] - delta) * score.slope;
            }
        }
        let (rows_end, cols_end) =
            (self.warp_row + comptime!(16 * plan.products - 1), step.col0 + comptime!(plan.cols - 1));
        let (query, last) = if comptime!(of_keys) { (step.col0, rows_end) } else { (self.warp_row, cols_end) };
        if scores.is_partial(query, last, step.class) {
            #[unroll]
            for i in 0..comptime!(plan.scores()) {
                let [down, across] = comptime!(plan.place(i));
                let (query, key) =
                    if comptime!(of_keys) { (col + across, row + down) } else { (row + down, col + across) };
                let hidden = scores.is_hidden(&step.item, query, key, step.class);
                weights[i as usize] = select(hidden, HIDDEN, weights[i as usize]);
            }
        }
        if comptime!(!plan.role.is_forward()) {
            #[unroll]
            for i in 0..comptime!(plan.scores()) {
                let lse = stats.value(&mut pair, i, true, plan);
                let weight = exp2_approx(fma(weights[i as usize], LOG2E, -lse));
                weights[i as usize] = weight;
                if comptime!(plan.role.sums_slopes()) {
                    slopes[i as usize] *= weight;
                }
            }
        }
    }
}

/// Largest score, and sum of the weights of the lane's columns, of each of the lane's rows.
#[derive(CubeType)]
pub(in crate::attention) struct Softmax {
    pub(in crate::attention) maxima: Array<f32>,
    totals: Array<f32>,
}

#[cube]
impl Softmax {
    pub(in crate::attention) fn new(#[comptime] plan: MmaPlan) -> Softmax {
        let mut maxima = zeros(comptime!(plan.lane_rows()));
        #[unroll]
        for r in 0..comptime!(plan.lane_rows()) {
            maxima[r as usize] = NOTHING;
        }
        Softmax { maxima, totals: zeros(comptime!(plan.lane_rows())) }
    }

    /// Sum of the weights of one of the lane's rows.
    pub(in crate::attention) fn total(&self, #[comptime] row: u32) -> f32 {
        over_row(self.totals[row as usize], LaneFold::Sum)
    }

    /// Replaces scores by the weights of forward, with the largest score of each row so far as
    /// maximum. Returns each row's factor of earlier weights.
    pub(in crate::attention) fn weigh(&mut self, weights: &mut Array<f32>, #[comptime] plan: MmaPlan) -> Array<f32> {
        let tiles = comptime!(plan.cols / 8);
        let mut factors = Array::<f32>::new(comptime!(plan.lane_rows() as usize));
        #[unroll]
        for r in 0..comptime!(plan.lane_rows()) {
            let first = comptime!(4 * tiles * (r / 2) + 2 * (r % 2));
            let old = self.maxima[r as usize];
            let mut largest = old;
            #[unroll]
            for i in 0..comptime!(2 * tiles) {
                largest = max(largest, weights[comptime!((first + i / 2 * 4 + i % 2) as usize)]);
            }
            let largest = over_row(largest, LaneFold::Max);
            self.maxima[r as usize] = largest;
            let factor = exp2_approx((old - largest) * LOG2E);
            let shift = -largest * LOG2E;
            let mut total = self.totals[r as usize] * factor;
            #[unroll]
            for i in 0..comptime!(2 * tiles) {
                let at = comptime!((first + i / 2 * 4 + i % 2) as usize);
                let weight = exp2_approx(fma(weights[at], LOG2E, shift));
                total += weight;
                weights[at] = weight;
            }
            self.totals[r as usize] = total;
            factors[r as usize] = factor;
        }
        factors
    }
}

/// Multiplies the sums of weights of each row by its factor.
#[cube]
pub(in crate::attention) fn rescale(sums: &mut Array<f32>, factors: &Array<f32>, #[comptime] plan: MmaPlan) {
    let tiles = comptime!(plan.slices[1] * TILE / 8);
    #[unroll]
    for r in 0..comptime!(plan.lane_rows()) {
        #[unroll]
        for i in 0..comptime!(2 * tiles) {
            let at = comptime!(4 * tiles * (r / 2) + 2 * (r % 2) + i / 2 * 4 + i % 2);
            sums[at as usize] *= factors[r as usize];
        }
    }
}

/// Maximum or sum of a value over the four lanes of a row, in each of them.
#[cube]
fn over_row(value: f32, #[comptime] fold: LaneFold) -> f32 {
    let mut result = value;
    #[unroll]
    for lanes in 0..2u32 {
        let other = plane_shuffle_xor(result, comptime!(1u32 << lanes));
        result = if comptime!(fold == LaneFold::Max) { max(result, other) } else { result + other };
    }
    result
}

/// Products of the warp's rows and of columns, both in shared memory.
#[cube]
pub(in crate::attention) fn products(
    rows: u32,
    cols: u32,
    lanes: &Lanes,
    #[comptime] slices: u32,
    #[comptime] plan: MmaPlan,
) -> Array<f32> {
    let mut sums = zeros(comptime!(if slices > 0 { plan.scores() } else { 1 }));
    let (rows, cols) = (rows + lanes.warp + lanes.down, cols + lanes.across);
    let tiles = comptime!(plan.cols / 8);
    #[unroll]
    for k in 0..comptime!(4 * slices) {
        let (mut a, mut b) = fragments(plan);
        // Two pieces further flips other bits of the swizzle.
        let (slice, piece) = comptime!((k / 4, 32 * (k % 4)));
        #[unroll]
        for i in 0..comptime!(plan.products) {
            let at = comptime!((slice * plan.rows() + 16 * i) * ROW);
            load_matrices(&mut a, comptime!(4 * i), (rows ^ piece) + at);
        }
        #[unroll]
        for j in 0..comptime!(tiles / 2) {
            let at = comptime!((slice * plan.cols + 16 * j) * ROW);
            load_matrices(&mut b, 0u32, (cols ^ piece) + at);
            multiply(&mut sums, &a, &b, comptime!(2 * j), tiles, plan);
        }
    }
    sums
}

/// Adds weights, rounded, times columns in shared memory to `sums`.
#[cube]
pub(in crate::attention) fn accumulate(
    weights: &Array<f32>,
    cols: u32,
    lanes: &Lanes,
    sums: &mut Array<f32>,
    #[comptime] slices: u32,
    #[comptime] plan: MmaPlan,
) {
    let cols = cols + lanes.down;
    #[unroll]
    for k in 0..comptime!(plan.cols / 16) {
        let (mut a, mut b) = fragments(plan);
        #[unroll]
        for i in 0..comptime!(4 * plan.products) {
            let tile = comptime!(i / 4 * (plan.cols / 8) + 2 * k + i % 4 / 2);
            let at = comptime!((4 * tile + 2 * (i % 2)) as usize);
            a[i as usize] = pack_half(weights[at], weights[comptime!(at + 1)], comptime!(plan.bf16));
        }
        #[unroll]
        for j in 0..comptime!(4 * slices) {
            let (slice, piece) = comptime!((j / 4, 32 * (j % 4)));
            let at = comptime!((slice * plan.cols + 16 * k) * ROW);
            load_matrices_transposed(&mut b, 0u32, (cols ^ piece) + at);
            multiply(sums, &a, &b, comptime!(2 * j), comptime!(8 * slices), plan);
        }
    }
}

/// Fragments of the warp's rows, and of two products' columns.
#[cube]
fn fragments(#[comptime] plan: MmaPlan) -> (Array<u32>, Array<u32>) {
    let mut a = Array::<u32>::new(comptime!((4 * plan.products) as usize));
    let mut b = Array::<u32>::new(4usize);
    // Overwritten later. Makes CubeCL declare the arrays, which otherwise only raw statements use.
    a[0] = 0u32;
    b[0] = 0u32;
    (a, b)
}

/// Adds the products of all rows and of columns `tile` and `tile + 1` of `tiles`.
#[cube]
fn multiply(
    sums: &mut Array<f32>,
    a: &Array<u32>,
    b: &Array<u32>,
    #[comptime] tile: u32,
    #[comptime] tiles: u32,
    #[comptime] plan: MmaPlan,
) {
    #[unroll]
    for half in 0..2u32 {
        #[unroll]
        for i in 0..comptime!(plan.products) {
            mma_half(sums, a, b, comptime!([4 * (i * tiles + tile + half), 4 * i, 2 * half]), comptime!(plan.bf16));
        }
    }
}
