//! Loads of f32 block scales, which are contiguous along the contraction in device memory. One load
//! covers two or four steps.

use cubecl::prelude::*;

use super::item::Item;
use crate::Operand;
use crate::gemm::problem::Problem;
use crate::granularity::BLOCK;

/// Blocks of the contraction whose scales one load covers: up to 16 bytes if every row of scales is
/// aligned to the load.
pub(in crate::gemm) fn load_width(operand: &Operand) -> u32 {
    let (blocks, offset) = (operand.k.div_ceil(BLOCK), operand.inv_scale.offset_start.unwrap_or(0));
    let fits = |width: &u32| blocks.is_multiple_of(*width as usize) && offset.is_multiple_of(4 * u64::from(*width));
    if operand.granularity.is_blocks() { [4, 2].into_iter().find(fits).unwrap_or(1) } else { 1 }
}

/// Whether step `step` needs a load, for a thread that loads the scales of `steps` steps at once,
/// from multiples of `steps`.
#[cube]
pub(in crate::gemm) fn loads_at(step: u32, item: &Item, #[comptime] steps: u32) -> bool {
    let since_load = step % steps;
    step == item.step_begin || since_load == 0
}

/// Inverse scale of row `row` of operand 0 (A) or 1 (B) for step `step` of 128 of an item's
/// contraction. `held` has the `width` scales of one load.
#[cube]
pub(in crate::gemm) fn step_factor(
    held: &mut Array<f32>,
    problem: &Problem,
    row: u32,
    step: u32,
    item: &Item,
    #[comptime] width: u32,
    #[comptime] side: usize,
) -> f32 {
    if comptime!(width == 1) {
        problem.factor(row, step, side)
    } else {
        if loads_at(step, item, width) {
            problem.load_factors(held, 0u32, row, step / width * width, width, side);
        }
        pick(held, step % width, 0u32, width)
    }
}

/// Word `which` of the `width` words, starting at `first`. Uses selects, because registers have no
/// run-time index.
#[cube]
pub(in crate::gemm) fn pick(words: &Array<f32>, which: u32, #[comptime] first: u32, #[comptime] width: u32) -> f32 {
    let mut word = words[comptime!(first as usize)];
    #[unroll]
    for i in 1..comptime!(width) {
        word = select(which == i, words[comptime!((first + i) as usize)], word);
    }
    word
}
