//! [`Problem`]: kernel arguments that all GEMMs share, and the [`Work`] of a tile.

use cubecl::prelude::*;

use super::Gemm;
use super::grouped::Grouping;
use super::schedule::{GroupCursor, GroupSizes, Work, first_group, grouped_tile};
use crate::element_type::ElementType;
use crate::granularity::BLOCK;
use crate::grid::banded_tile;
use crate::load::{Geometry, GeometryLaunch, load_scalar};
use crate::mx::e8m0_byte;
use crate::ptx::memory::load_global_words;
use crate::scale::{scale_index, scale_word};
use crate::view::Checked;
use crate::{Granularity, row_words};

/// Optional vector that is added to every row.
#[derive(CubeType, CubeLaunch)]
pub(super) struct Bias {
    pub(super) values: ComptimeOption<Array<u32>>,
    geometry: Geometry,
    #[cube(comptime)]
    element_type: ElementType,
}

impl<R: Runtime> BiasLaunch<R> {
    /// Kernel argument for a checked bias.
    fn of(bias: Option<&Checked>) -> Self {
        let geometry = bias.map_or_else(|| GeometryLaunch::new(0, 0, 0, 0, 0), Checked::geometry);
        Self::new(bias.map(Checked::array).into(), geometry, bias.map_or(ElementType::F32, |bias| bias.element_type))
    }
}

#[cube]
impl Bias {
    /// Bias of column `col`.
    pub(super) fn at(&self, col: u32) -> f32 {
        #[comptime]
        match &self.values {
            ComptimeOption::Some(values) => load_scalar(values, &self.geometry, col, comptime!(self.element_type)),
            ComptimeOption::None => f32::new(0.0),
        }
    }
}

/// Scales, bias, groups and sizes.
#[derive(CubeType, CubeLaunch)]
pub(super) struct Problem {
    pub(super) inv_scale_a: Array<u32>,
    pub(super) inv_scale_b: Array<u32>,
    pub(super) bias: Bias,
    ends: ComptimeOption<Array<u32>>,
    /// Rows of one output matrix.
    pub(super) m: u32,
    /// Columns of one output matrix.
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
    /// Kernel argument, with this bias.
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
            gemm.shape().grouping(),
        )
    }
}

#[cube]
impl Problem {
    /// Scales of operand 0 (A) or 1 (B).
    pub(super) fn inv_scales(&self, #[comptime] side: usize) -> &Array<u32> {
        if comptime!(side == 0) { &self.inv_scale_a } else { &self.inv_scale_b }
    }

    /// Factor of a sum over block `block` of 128, for row `row` of operand 0 (A) or 1 (B).
    pub(super) fn factor(&self, row: u32, block: u32, #[comptime] side: usize) -> f32 {
        let granularity = comptime!(self.granularities[side]);
        if comptime!(granularity.is_mx()) {
            // E8M0 scales are applied earlier, to codes or products.
            1.0f32.runtime()
        } else {
            f32::reinterpret(scale_word(self.inv_scales(side), row, block, self.blocks, granularity))
        }
    }

    /// Loads [`factor`](Self::factor) of `width` blocks into `to[first..]`, starting at `block`, a
    /// multiple of `width`. If `width` is above 1 this is one load of block scales, and the blocks
    /// of a row must be a multiple of `width`.
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
            load_global_words(self.inv_scales(side), index, to, first, width);
        }
    }

    /// E8M0 byte of row `row` of operand 0 (A) or 1 (B), for block `block` of 32.
    pub(super) fn e8m0(&self, row: u32, block: u32, #[comptime] side: usize) -> u32 {
        e8m0_byte(self.inv_scales(side), row, block, self.blocks)
    }

    /// Row of operand 0 (A) or 1 (B) for row or column `line` of the output. Past the end, where
    /// the scale is arbitrary, it is the last row.
    pub(super) fn row_of(&self, line: u32, work: &Work, #[comptime] side: usize) -> u32 {
        if comptime!(side == 0) { min(line, self.m - 1) } else { work.row0_b + min(line, self.n - 1) }
    }

    /// [`factor`](Self::factor) of row or column `line` of the output.
    pub(super) fn line_factor(&self, line: u32, work: &Work, block: u32, #[comptime] side: usize) -> f32 {
        self.factor(self.row_of(line, work, side), block, side)
    }

    /// Output element: a sum, scaled unless block scales are already applied, plus the bias. If
    /// `any` is false, nothing was multiplied, and no scale has an effect, not even NaN.
    pub(super) fn finish(&self, sum: f32, scale: f32, bias: f32, any: bool) -> f32 {
        let mut total = sum;
        if comptime!(!Granularity::any_blocks(self.granularities)) {
            total *= scale;
        }
        if comptime!(self.grouping.is_some()) {
            total = select(any, total, 0.0f32);
        }
        total + bias
    }

    /// Stores element `[row, col]` if the work owns it. Rounds once.
    pub(super) fn put<O: Float>(&self, out: &mut Array<O>, value: f32, row: u32, col: u32, work: &Work) {
        if row >= work.row_begin && row < work.row_end && col < self.n {
            let index = (work.out0 + row * self.n + col) as usize;
            out[index] = O::cast_from(value);
        }
    }

    /// Stores element `[row, col]` of a single-matrix output from its sum.
    pub(super) fn store<O: Float>(&self, out: &mut Array<O>, sum: f32, row: u32, col: u32) {
        let work = self.whole_work(0u32.runtime(), 0u32.runtime());
        let scale =
            self.line_factor(row, &work, 0u32.runtime(), 0usize) * self.line_factor(col, &work, 0u32.runtime(), 1usize);
        let value = self.finish(sum, scale, self.bias.at(col), true.runtime());
        self.put::<O>(out, value, row, col, &work);
    }

    /// Work of tile `number` of size `tile`, in bands. Grouped GEMMs go through one group after the
    /// other.
    pub(super) fn work(&self, number: u32, #[comptime] tile: [u32; 2]) -> Work {
        let [height, width] = comptime!(tile);
        let cols = self.n.div_ceil(width);
        if comptime!(self.grouping.is_some()) {
            let mut cursor = first_group();
            self.group_work(number, cols, &mut cursor, tile, 1u32)
        } else {
            let (row, col) = banded_tile(number, self.m.div_ceil(height), cols);
            // Keeps spare cubes from wrapping around in a matrix of nearly 2^32 rows.
            let row = min(row, comptime!(u32::MAX / tile[0]));
            self.whole_work(row * height, col * width)
        }
    }

    /// Work of a tile of a single-matrix output.
    pub(super) fn whole_work(&self, row0: u32, col0: u32) -> Work {
        let (zero, m, k) = (0u32.runtime(), self.m, self.words * 4);
        Work {
            row0,
            row_begin: zero,
            row_end: m,
            col0,
            row0_b: zero,
            k_begin: zero,
            k_end: k,
            matrix: zero,
            out0: zero,
        }
    }

    /// Work of tile `number` of a grouped GEMM, with `cols` tiles along N. Tiles start at rows of B
    /// that are multiples of `align`.
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
