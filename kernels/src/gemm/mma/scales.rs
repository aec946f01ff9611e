//! A thread's scales, as words in their memory layout: f32 bits, or four E8M0 bytes for 128 of the
//! contraction.

use cubecl::prelude::*;

use super::MmaConfig;
use crate::Granularity;
use crate::gemm::problem::Problem;
use crate::mx::e8m0_inverse_bits_of;
use crate::ptx::mma::{MmaKind, ScaleSource};
use crate::scale::scale_word;

/// Offsets of a thread's rows of an operand, relative to its first row.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum LinesOf {
    /// Rows of its sums: 0, 8, 16, ...
    Rows,
    /// Columns of its sums: 0, 1, 8, 9, ...
    Cols,
    /// Rows whose scales its lane supplies to block-scaled products: 0, 32, ...
    Given,
}

impl LinesOf {
    pub(super) const fn offset(self, i: u32) -> u32 {
        match self {
            LinesOf::Rows => 8 * i,
            LinesOf::Cols => i / 2 * 8 + i % 2,
            LinesOf::Given => 32 * i,
        }
    }
}

impl MmaConfig {
    /// Rows of operand 0 (A) or 1 (B) in a thread's sums.
    pub(super) const fn line_count(self, side: usize) -> u32 {
        2 * self.tile.products()[side]
    }

    /// Words of E8M0 scales of that operand that a thread holds.
    pub(super) const fn word_count(self, side: usize) -> u32 {
        match self.kind {
            MmaKind::Plain => self.line_count(side),
            // A lane's word has the scales of one row, so a warp's words cover 32 rows. These are
            // two products with 16 rows of A, or four with 8 rows of B.
            MmaKind::BlockScaled => self.tile.products()[side].div_ceil([2, 4][side]),
        }
    }

    /// Whether scales are loaded one block ahead, because a block's first product needs them. Only
    /// if they take few registers.
    pub(super) const fn loads_ahead(self) -> bool {
        matches!(self.kind, MmaKind::BlockScaled)
    }

    /// Rows whose E8M0 scales a thread holds.
    const fn word_source(self, side: usize) -> ScaleLines {
        let of = match self.kind {
            MmaKind::Plain => self.sum_lines(side),
            MmaKind::BlockScaled => LinesOf::Given,
        };
        ScaleLines { of, count: self.word_count(side), granularity: Granularity::Block1x32, differ: true }
    }

    /// Rows whose f32 scales a thread holds.
    const fn factor_source(self, side: usize, granularity: Granularity) -> ScaleLines {
        let count = self.line_count(side);
        let differ = if side == 0 { granularity.is_by_row() } else { self.scales_b_differ };
        ScaleLines { of: self.sum_lines(side), count, granularity, differ }
    }

    /// Rows of an operand in a thread's sums.
    pub(super) const fn sum_lines(self, side: usize) -> LinesOf {
        if side == 0 { LinesOf::Rows } else { LinesOf::Cols }
    }

    /// Scale sources of product `[i, j]` for block `byte` of 32 in 128.
    pub(super) fn scale_sources(
        self,
        granularities: [Granularity; 2],
        product: [u32; 2],
        byte: u32,
    ) -> Option<[ScaleSource; 2]> {
        let element_type = |side: usize| {
            let per_word = [2, 4][side];
            match granularities[side].is_mx() {
                true => ScaleSource::Word { word: product[side] / per_word, byte, lanes: product[side] % per_word },
                false => ScaleSource::Ones,
            }
        };
        (self.kind == MmaKind::BlockScaled).then(|| [element_type(0), element_type(1)])
    }
}

/// Rows whose scales a thread loads.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct ScaleLines {
    of: LinesOf,
    count: u32,
    granularity: Granularity,
    /// Whether their scales may differ.
    differ: bool,
}

/// Start of a thread's part: a row of A and a row of B, which is a column of the output. Also the
/// end of each operand's rows.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Corner {
    pub(super) row: u32,
    pub(super) rows: u32,
    pub(super) col: u32,
    pub(super) cols: u32,
}

/// Scales of operand 0 (A) or 1 (B) that a thread holds.
#[derive(CubeType)]
pub(super) struct Scales {
    /// E8M0 scales of the current block of 128, four to a word.
    pub(super) words: Array<u32>,
    /// Words that are being loaded.
    next: Array<u32>,
    /// Bits of the f32 scales of the thread's sums.
    factors: Array<u32>,
    #[cube(comptime)]
    side: usize,
}

#[cube]
impl Scales {
    /// Allocates the arrays.
    pub(super) fn new(#[comptime] config: MmaConfig, #[comptime] side: usize) -> Self {
        Scales {
            words: Array::new(comptime!(config.word_count(side) as usize)),
            next: Array::new(comptime!(config.word_count(side) as usize)),
            factors: Array::new(comptime!(config.line_count(side) as usize)),
            side,
        }
    }

    /// Makes the loaded words current.
    pub(super) fn use_words(&mut self, problem: &Problem, #[comptime] config: MmaConfig) {
        if comptime!(problem.granularities[self.side].is_mx()) {
            #[unroll]
            for i in 0..comptime!(config.word_count(self.side) as usize) {
                self.words[i] = self.next[i];
            }
        }
    }

    /// Starts to load the E8M0 scales of a block.
    pub(super) fn load_words(&mut self, problem: &Problem, from: &Corner, block: u32, #[comptime] config: MmaConfig) {
        if comptime!(problem.granularities[self.side].is_mx()) {
            let lines = comptime!(config.word_source(self.side));
            load_scales(problem, &mut self.next, from, block, lines, comptime!(self.side));
        }
    }

    /// Loads the f32 scales of a block of 128.
    pub(super) fn load_factors(&mut self, problem: &Problem, from: &Corner, block: u32, #[comptime] config: MmaConfig) {
        let granularity = comptime!(problem.granularities[self.side]);
        if comptime!(!granularity.is_mx()) {
            let lines = comptime!(config.factor_source(self.side, granularity));
            load_scales(problem, &mut self.factors, from, block, lines, comptime!(self.side));
        }
    }

    /// E8M0 scales of block `byte` of 32, for the sums of one product.
    pub(super) fn of_product(&self, #[comptime] byte: u32, #[comptime] config: MmaConfig) -> Array<f32> {
        let count = comptime!(config.line_count(self.side) as usize);
        let mut factors = Array::<f32>::new(count);
        #[unroll]
        for i in 0..count {
            factors[i] = f32::reinterpret(e8m0_inverse_bits_of(self.words[i], byte));
        }
        factors
    }
}

/// Factor of the thread's sum `i` over the current block of 128, or over the whole contraction: the
/// product of the f32 scales. One for E8M0 scales, which have been applied to the products.
#[cube]
pub(super) fn sum_factor(
    a: &Scales,
    b: &Scales,
    problem: &Problem,
    #[comptime] i: u32,
    #[comptime] config: MmaConfig,
) -> f32 {
    let [row, col] = comptime!(config.lines_of(i));
    if comptime!(Granularity::any_mx(problem.granularities)) {
        1.0f32.runtime()
    } else {
        f32::reinterpret(a.factors[row as usize]) * f32::reinterpret(b.factors[col as usize])
    }
}

/// Loads the scales of some rows of an operand for block `block` of 128.
#[cube]
fn load_scales(
    problem: &Problem,
    to: &mut Array<u32>,
    from: &Corner,
    block: u32,
    #[comptime] lines: ScaleLines,
    #[comptime] side: usize,
) {
    let (first, rows) = if comptime!(side == 0) { (from.row, from.rows) } else { (from.col, from.cols) };
    let inv_scales = problem.inv_scales(side);
    #[unroll]
    for i in 0..comptime!(lines.count) {
        if comptime!(i == 0 || lines.differ) {
            // Past the last row the scale is arbitrary, so the last row's is loaded.
            let row = min(first + comptime!(lines.of.offset(i)), rows - 1);
            to[i as usize] = scale_word(inv_scales, row, block, problem.blocks, comptime!(lines.granularity));
        } else {
            to[i as usize] = to[0];
        }
    }
}
