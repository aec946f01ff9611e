//! Products of a warpgroup: of its rows and columns, and of weights or slopes and columns.

use cubecl::prelude::*;

use super::{GROUP, ROW, Tiles};
use crate::attention::TILE;
use crate::attention::mma::kernel::Sums;
use crate::attention::mma::lanes::zeros;
use crate::ptx::shared::fresh_address;
use crate::ptx::wgmma::{
    Element, Major, descriptor, pack_half, wgmma, wgmma_commit, wgmma_fence_all, wgmma_from_registers, wgmma_wait_all,
};

/// Products of a step, and weights, then slopes, rounded to 16 bits.
#[derive(CubeType)]
pub(super) struct Products {
    pub(super) weights: Array<f32>,
    pub(super) slopes: Array<f32>,
    words: Array<u32>,
}

#[cube]
impl Products {
    pub(super) fn new(#[comptime] tiles: Tiles) -> Products {
        let plan = comptime!(tiles.plan);
        let mut words = Array::<u32>::new(comptime!(plan.scores() as usize));
        // Makes CubeCL declare the array, which otherwise only raw statements use.
        words[0] = 0u32;
        Products {
            weights: zeros(comptime!(plan.scores())),
            slopes: zeros(comptime!(if plan.role.sums_slopes() { plan.scores() } else { 1 })),
            words,
        }
    }

    /// Starts to multiply the warpgroup's rows, in shared memory from `rows` on, by the columns at `cols`.
    pub(super) fn multiply(&mut self, rows: u32, cols: u32, #[comptime] tiles: Tiles) {
        let plan = comptime!(tiles.plan);
        let [slices, second_slices] = comptime!(plan.slices);
        let has_slopes = comptime!(plan.role.sums_slopes());
        let counts = comptime!(tiles.products());
        // Warpgroup 2 has the first 64 rows, as in `Lanes`.
        let rows = fresh_address(rows + UNIT_POS / GROUP % 2 * comptime!(64 * ROW));
        wgmma_fence_all(&mut self.weights, &mut self.slopes, &mut self.words, counts);
        product(&mut self.weights, rows, cols, slices, tiles);
        if comptime!(has_slopes) {
            let (rows, cols) = (rows + comptime!(plan.row_bytes()[0]), cols + comptime!(plan.cols * ROW * slices));
            product(&mut self.slopes, rows, cols, second_slices, tiles);
        }
        wgmma_commit();
    }

    /// Waits for the products, but not for `pending` later groups.
    pub(super) fn finish_products(&mut self, #[comptime] pending: u32, #[comptime] tiles: Tiles) {
        let counts = comptime!(tiles.products());
        wgmma_wait_all(&mut self.weights, &mut self.slopes, &mut self.words, counts, pending);
    }

    /// Rounds weights and slopes.
    pub(super) fn pack(&mut self, #[comptime] tiles: Tiles) {
        let plan = comptime!(tiles.plan);
        let [.., both] = comptime!(tiles.sums());
        let weights = comptime!(tiles.weights());
        #[unroll]
        for i in 0..weights {
            let at = comptime!(2 * i as usize);
            let pair = pack_half(self.weights[at], self.weights[comptime!(at + 1)], plan.bf16);
            self.words[i as usize] = pair;
        }
        #[unroll]
        for i in weights..both {
            let at = comptime!(2 * (i - weights) as usize);
            let pair = pack_half(self.slopes[at], self.slopes[comptime!(at + 1)], plan.bf16);
            self.words[i as usize] = pair;
        }
    }

    /// Starts to add weights, or slopes, times the columns at `cols` to the sums.
    pub(super) fn accumulate(&mut self, sums: &mut Sums, cols: u32, #[comptime] tiles: Tiles) {
        let plan = comptime!(tiles.plan);
        let [slices, second_slices] = comptime!(plan.slices);
        let counts = comptime!(tiles.sums());
        wgmma_fence_all(&mut sums.weighted, &mut sums.sloped, &mut self.words, counts);
        if comptime!(plan.role.sums_weights()) {
            let cols = cols + comptime!(plan.cols * ROW * slices);
            add_product(&mut sums.weighted, &self.words, 0u32, cols, second_slices, tiles);
        }
        if comptime!(plan.role.sums_slopes()) {
            add_product(&mut sums.sloped, &self.words, comptime!(tiles.weights()), cols, slices, tiles);
        }
        wgmma_commit();
    }

    /// Waits for the sums.
    pub(super) fn finish_sums(&mut self, sums: &mut Sums, #[comptime] tiles: Tiles) {
        let counts = comptime!(tiles.sums());
        wgmma_wait_all(&mut sums.weighted, &mut sums.sloped, &mut self.words, counts, 0u32);
    }
}

/// Issues the product of 64 rows and a stage's columns.
#[cube]
fn product(acc: &mut Array<f32>, rows: u32, cols: u32, #[comptime] slices: u32, #[comptime] tiles: Tiles) {
    let plan = comptime!(tiles.plan);
    let element = comptime!(Element::Half { bf16: plan.bf16, majors: [Major::K; 2] });
    let (a, b) = (descriptor(rows, 16u32), descriptor(cols, 16u32));
    #[unroll]
    for k in 0..comptime!(4 * slices) {
        // In units of 16 bytes: 32 bytes of a row, or the next slice.
        let [to_a, to_b] = comptime!([plan.rows(), plan.cols].map(|rows| (k / 4 * rows * ROW + k % 4 * 32) / 16));
        let add = comptime!(u32::from(k > 0)).runtime();
        wgmma(acc, a + u64::cast_from(to_a), b + u64::cast_from(to_b), add, plan.cols, element);
    }
}

/// Issues the product of `words` from `first` on and of a stage's columns, whose positions are the
/// contraction, and adds it.
#[cube]
fn add_product(
    acc: &mut Array<f32>,
    words: &Array<u32>,
    #[comptime] first: u32,
    cols: u32,
    #[comptime] slices: u32,
    #[comptime] tiles: Tiles,
) {
    let plan = comptime!(tiles.plan);
    let b = descriptor(cols, comptime!(plan.cols * ROW));
    #[unroll]
    for k in 0..comptime!(plan.cols / 16) {
        let b = b + u64::cast_from(comptime!(k * ROW));
        wgmma_from_registers(acc, words, comptime!(first + 4 * k), b, comptime!(slices * TILE), plan.bf16);
    }
}
