//! [`Problem`]: what a GEMM computes, as every kernel is given it, and which [`Work`] a tile of it is.

use cubecl::prelude::*;

use super::Gemm;
use super::bias::{Bias, BiasLaunch};
use super::grouped::Grouping;
use super::schedule::{GroupCursor, GroupSizes, Work, first_group, grouped_tile, whole};
use crate::granularity::BLOCK;
use crate::grid::banded_tile;
use crate::mx::e8m0_byte;
use crate::ptx::memory::load_global_words;
use crate::scale::{scale_index, sum_factor};
use crate::view::Checked;
use crate::{Granularity, row_words};

/// Scales, bias, groups and sizes.
#[derive(CubeType, CubeLaunch)]
pub(super) struct Problem {
    pub(super) inv_scale_a: Array<u32>,
    pub(super) inv_scale_b: Array<u32>,
    pub(super) bias: Bias,
    ends: ComptimeOption<Array<u32>>,
    /// Rows of one matrix of the output.
    pub(super) m: u32,
    /// Columns of one matrix of the output.
    pub(super) n: u32,
    /// Words of a row of codes.
    pub(super) words: u32,
    /// Blocks of 128 of the contraction.
    pub(super) blocks: u32,
    groups: u32,
    #[cube(comptime)]
    pub(super) granularities: [Granularity; 2],
    #[cube(comptime)]
    pub(super) grouping: Option<Grouping>,
}

impl<R: Runtime> ProblemLaunch<R> {
    /// The kernel's argument, with this bias.
    pub(super) fn of(gemm: &Gemm, bias: Option<&Checked>) -> Self {
        let (m, n, _) = gemm.matrices();
        // SAFETY: the operands of a `Gemm` are checked.
        let [inv_scale_a, inv_scale_b] = [gemm.a, gemm.b].map(|operand| unsafe { operand.scales_array() });
        Self::new(
            inv_scale_a,
            inv_scale_b,
            BiasLaunch::of(bias),
            gemm.groups.map(|groups| groups.array()).into(),
            m as u32,
            n as u32,
            row_words(gemm.a.k) as u32,
            gemm.a.k.div_ceil(BLOCK) as u32,
            gemm.groups.map_or(0, |groups| groups.count) as u32,
            [gemm.a.granularity, gemm.b.granularity],
            gemm.grouping(),
        )
    }
}

#[cube]
impl Problem {
    /// What a sum over block `block` of 128 is multiplied by for row `row` of operand 0, A, or 1, B.
    pub(super) fn factor(&self, row: u32, block: u32, #[comptime] side: usize) -> f32 {
        if comptime!(side == 0) {
            sum_factor(&self.inv_scale_a, row, block, self.blocks, comptime!(self.granularities[0]))
        } else {
            sum_factor(&self.inv_scale_b, row, block, self.blocks, comptime!(self.granularities[1]))
        }
    }

    /// [`factor`](Self::factor) of `width` blocks from `block` on, which is a multiple of it, to `to[first..]`. More than one are one
    /// load of scales of blocks, whose rows then have a multiple of `width` of them.
    pub(super) fn load_factors(
        &self,
        to: &mut Array<f32>,
        #[comptime] first: u32,
        row: u32,
        block: u32,
        #[comptime] width: u32,
        #[comptime] side: usize,
    ) {
        if comptime!(width == 1) {
            to[comptime!(first as usize)] = self.factor(row, block, side);
        } else {
            let index = scale_index(row, block, self.blocks, comptime!(self.granularities[side]));
            if comptime!(side == 0) {
                load_global_words(&self.inv_scale_a, index, to, first, width);
            } else {
                load_global_words(&self.inv_scale_b, index, to, first, width);
            }
        }
    }

    /// The E8M0 scale of row `row` of operand 0, A, or 1, B, for block `block` of 32.
    pub(super) fn e8m0(&self, row: u32, block: u32, #[comptime] side: usize) -> u32 {
        if comptime!(side == 0) {
            e8m0_byte(&self.inv_scale_a, row, block, self.blocks)
        } else {
            e8m0_byte(&self.inv_scale_b, row, block, self.blocks)
        }
    }

    /// Tile `number` of size `tile`, in bands; of groups, one after the other.
    pub(super) fn work(&self, number: u32, #[comptime] tile: [u32; 2]) -> Work {
        let [height, width] = comptime!(tile);
        let cols = self.n.div_ceil(width);
        if comptime!(self.grouping.is_some()) {
            let mut cursor = first_group();
            self.group_work(number, cols, &mut cursor, tile, 1u32)
        } else {
            let (row, col) = banded_tile(number, self.m.div_ceil(height), cols);
            // No wrapping around for spare cubes of a matrix of nearly 2^32 rows.
            let row = min(row, comptime!(u32::MAX / tile[0]));
            self.whole_work(row * height, col * width)
        }
    }

    /// The work of a tile of an output that is one matrix.
    pub(super) fn whole_work(&self, row0: u32, col0: u32) -> Work {
        whole(row0, col0, self.m, self.words * 4)
    }

    /// Tile `number` of groups, `cols` along N, beginning where the row of B is a multiple of `align`.
    pub(super) fn group_work(
        &self,
        number: u32,
        cols: u32,
        cursor: &mut GroupCursor,
        #[comptime] tile: [u32; 2],
        #[comptime] align: u32,
    ) -> Work {
        let grouping = comptime!(self.grouping.expect("there are groups"));
        #[comptime]
        match &self.ends {
            ComptimeOption::Some(ends) => {
                let sizes = GroupSizes { groups: self.groups, m: self.m, n: self.n, k: self.words * 4 };
                grouped_tile(number, cols, ends, &sizes, cursor, grouping, tile, align)
            }
            ComptimeOption::None => self.whole_work(0u32.runtime(), 0u32.runtime()),
        }
    }
}
