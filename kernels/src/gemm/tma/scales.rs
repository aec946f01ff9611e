//! Loads of f32 scales of blocks, which lie in device memory by blocks of the contraction: those of two or four steps come at once.

use cubecl::prelude::*;

use super::item::Item;
use crate::Operand;
use crate::gemm::problem::Problem;
use crate::granularity::BLOCK;

/// Blocks of the contraction whose scales one load brings: as many as 16 bytes have where all rows of scales begin at a multiple of
/// that.
pub(in crate::gemm) fn load_width(operand: &Operand) -> u32 {
    let (blocks, offset) = (operand.k.div_ceil(BLOCK), operand.inv_scale.offset_start.unwrap_or(0));
    let fits = |width: &u32| blocks.is_multiple_of(*width as usize) && offset.is_multiple_of(4 * u64::from(*width));
    if operand.granularity.is_blocks() { [4, 2].into_iter().find(fits).unwrap_or(1) } else { 1 }
}

/// Whether a thread that loads scales for `steps` steps at once, those from a multiple of it on, has to load those of step `step`.
#[cube]
pub(in crate::gemm) fn loads_at(step: u32, item: &Item, #[comptime] steps: u32) -> bool {
    let since_load = step % steps;
    step == item.step_begin || since_load == 0
}

/// The inverse scale of row `row` of operand 0, A, or 1, B, for step `step` of 128 of an item's contraction, of the `width` that one
/// load has brought to `held`.
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

/// Word `which` of the `width` words from `first` on, without an index at run time, which registers do not have.
#[cube]
pub(in crate::gemm) fn pick(words: &Array<f32>, which: u32, #[comptime] first: u32, #[comptime] width: u32) -> f32 {
    let mut word = words[comptime!(first as usize)];
    #[unroll]
    for i in 1..comptime!(width) {
        word = select(which == i, words[comptime!((first + i) as usize)], word);
    }
    word
}
