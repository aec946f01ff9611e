//! The scales that a thread needs, as the words in which they lie in memory: f32 bits, or four E8M0 bytes for 128 of the
//! contraction.

use cubecl::prelude::*;

use super::Config;
use crate::Granularity;
use crate::gemm::problem::Problem;
use crate::mx::e8m0_inverse_bits_of;
use crate::ptx::mma::{MmaKind, ScaleSource};
use crate::scale::scale_index;

/// Which rows of an operand a thread asks for, from a first one on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum LinesOf {
    /// Rows of its sums: 0, 8, 16, ...
    Rows,
    /// Columns of its sums: 0, 1, 8, 9, ...
    Cols,
    /// Rows whose scales its lane gives to block-scaled products: 0, 32, ...
    Given,
}

impl LinesOf {
    const fn offset(self, i: u32) -> u32 {
        match self {
            LinesOf::Rows => 8 * i,
            LinesOf::Cols => i / 2 * 8 + i % 2,
            LinesOf::Given => 32 * i,
        }
    }
}

impl Config {
    /// How many rows of operand 0, A, or 1, B, the sums of a thread have.
    pub(super) const fn line_count(self, side: usize) -> u32 {
        2 * self.tile.products()[side]
    }

    /// How many words of E8M0 scales of that operand a thread holds.
    pub(super) const fn word_count(self, side: usize) -> u32 {
        match self.kind {
            MmaKind::Plain => self.line_count(side),
            // A word of each lane has the scales of 32 rows: of two products with 16 rows of A, or of four with 8 rows of B.
            MmaKind::BlockScaled => self.tile.products()[side].div_ceil([2, 4][side]),
        }
    }

    /// Whether scales are loaded one block ahead, since the first product of a block needs them: where they take few registers.
    pub(super) const fn loads_ahead(self) -> bool {
        matches!(self.kind, MmaKind::BlockScaled)
    }

    /// Which rows they are for.
    pub(super) const fn word_lines(self, side: usize) -> LinesOf {
        match self.kind {
            MmaKind::Plain => self.sum_lines(side),
            MmaKind::BlockScaled => LinesOf::Given,
        }
    }

    /// The rows whose E8M0 scales it holds.
    const fn word_source(self, side: usize) -> Lines {
        let count = self.word_count(side);
        Lines { of: self.word_lines(side), count, granularity: Granularity::Block1x32, differ: true }
    }

    /// The rows whose f32 scales it holds.
    const fn factor_source(self, side: usize, granularity: Granularity) -> Lines {
        let count = self.line_count(side);
        let differ = if side == 0 { granularity.is_by_row() } else { self.scales_b_differ };
        Lines { of: self.sum_lines(side), count, granularity, differ }
    }

    /// Which rows of an operand the sums of a thread have.
    pub(super) const fn sum_lines(self, side: usize) -> LinesOf {
        if side == 0 { LinesOf::Rows } else { LinesOf::Cols }
    }

    /// Where product `[i, j]` of block `byte` of 32 in 128 finds its scales.
    pub(super) fn scale_sources(
        self,
        granularities: [Granularity; 2],
        product: [u32; 2],
        byte: u32,
    ) -> Option<[ScaleSource; 2]> {
        let source = |side: usize| {
            let per_word = [2, 4][side];
            match granularities[side].is_mx() {
                true => ScaleSource::Word { word: product[side] / per_word, byte, lanes: product[side] % per_word },
                false => ScaleSource::Ones,
            }
        };
        (self.kind == MmaKind::BlockScaled).then(|| [source(0), source(1)])
    }
}

/// Rows that a thread asks for the scales of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Lines {
    of: LinesOf,
    count: u32,
    granularity: Granularity,
    /// Whether they may have different scales.
    differ: bool,
}

/// Where a thread's part begins: a row of A and a row of B, which is a column of the output; and where the rows of each end.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Corner {
    pub(super) row: u32,
    pub(super) rows: u32,
    pub(super) col: u32,
    pub(super) cols: u32,
}

/// What a thread holds of both operands' scales.
#[derive(CubeType)]
pub(super) struct Scales {
    /// E8M0 scales of the current block of 128, four to a word.
    pub(super) words_a: Array<u32>,
    pub(super) words_b: Array<u32>,
    /// The scales that are on their way.
    next_a: Array<u32>,
    next_b: Array<u32>,
    /// Bits of the f32 scales of the thread's sums.
    pub(super) factors_a: Array<u32>,
    pub(super) factors_b: Array<u32>,
}

#[cube]
impl Scales {
    /// Room for them.
    pub(super) fn new(#[comptime] config: Config) -> Self {
        Scales {
            words_a: Array::new(comptime!(config.word_count(0) as usize)),
            words_b: Array::new(comptime!(config.word_count(1) as usize)),
            next_a: Array::new(comptime!(config.word_count(0) as usize)),
            next_b: Array::new(comptime!(config.word_count(1) as usize)),
            factors_a: Array::new(comptime!(config.line_count(0) as usize)),
            factors_b: Array::new(comptime!(config.line_count(1) as usize)),
        }
    }

    /// Makes those that were brought the current ones.
    pub(super) fn use_words(&mut self, problem: &Problem, #[comptime] config: Config) {
        if comptime!(problem.granularities[0].is_mx()) {
            #[unroll]
            for i in 0..comptime!(config.word_count(0) as usize) {
                self.words_a[i] = self.next_a[i];
            }
        }
        if comptime!(problem.granularities[1].is_mx()) {
            #[unroll]
            for i in 0..comptime!(config.word_count(1) as usize) {
                self.words_b[i] = self.next_b[i];
            }
        }
    }

    /// Starts to bring the E8M0 scales of a block.
    pub(super) fn load_words(&mut self, problem: &Problem, from: &Corner, block: u32, #[comptime] config: Config) {
        if comptime!(problem.granularities[0].is_mx()) {
            let rows = comptime!(config.word_source(0));
            load_scales(&problem.inv_scale_a, &mut self.next_a, from.row, from.rows, block, problem.blocks, rows);
        }
        if comptime!(problem.granularities[1].is_mx()) {
            let cols = comptime!(config.word_source(1));
            load_scales(&problem.inv_scale_b, &mut self.next_b, from.col, from.cols, block, problem.blocks, cols);
        }
    }

    /// Brings the f32 scales of a block of 128.
    pub(super) fn load_factors(&mut self, problem: &Problem, from: &Corner, block: u32, #[comptime] config: Config) {
        let [granularity_a, granularity_b] = comptime!(problem.granularities);
        if comptime!(!granularity_a.is_mx()) {
            let rows = comptime!(config.factor_source(0, granularity_a));
            load_scales(&problem.inv_scale_a, &mut self.factors_a, from.row, from.rows, block, problem.blocks, rows);
        }
        if comptime!(!granularity_b.is_mx()) {
            let cols = comptime!(config.factor_source(1, granularity_b));
            load_scales(&problem.inv_scale_b, &mut self.factors_b, from.col, from.cols, block, problem.blocks, cols);
        }
    }

    /// What the thread's sum `i` is multiplied by once it is over the current block of 128, or over all: the product of the
    /// f32 scales. E8M0 scales have multiplied the products.
    pub(super) fn factor(&self, problem: &Problem, #[comptime] i: u32, #[comptime] config: Config) -> f32 {
        let [row, col] = comptime!(config.lines_of(i));
        let [granularity_a, granularity_b] = comptime!(problem.granularities);
        if comptime!(granularity_a.is_mx() && granularity_b.is_mx()) {
            1.0f32.runtime()
        } else if comptime!(granularity_a.is_mx()) {
            f32::reinterpret(self.factors_b[col as usize])
        } else if comptime!(granularity_b.is_mx()) {
            f32::reinterpret(self.factors_a[row as usize])
        } else {
            f32::reinterpret(self.factors_a[row as usize]) * f32::reinterpret(self.factors_b[col as usize])
        }
    }
}

/// Scales of some rows for block `block` of 128.
#[cube]
fn load_scales(
    inv_scales: &Array<u32>,
    to: &mut Array<u32>,
    first: u32,
    rows: u32,
    block: u32,
    blocks: u32,
    #[comptime] lines: Lines,
) {
    #[unroll]
    for i in 0..comptime!(lines.count) {
        if comptime!(i == 0 || lines.differ) {
            // Past the last row there is nothing to scale; any scale will do.
            let row = min(first + comptime!(lines.of.offset(i)), rows - 1);
            to[i as usize] = inv_scales[scale_index(row, block, blocks, comptime!(lines.granularity)) as usize];
        } else {
            to[i as usize] = to[0];
        }
    }
}

/// What the sums of one product are multiplied by: the E8M0 scales in byte `byte` of `words`, or f32 scales of 128 that change
/// along the contraction; else 1.
#[cube]
pub(super) fn product_factors(
    words: &Array<u32>,
    scales: &Array<u32>,
    #[comptime] byte: u32,
    #[comptime] count: u32,
    #[comptime] granularity: Granularity,
) -> Array<f32> {
    let mut factors = Array::<f32>::new(comptime!(count as usize));
    #[unroll]
    for i in 0..comptime!(count as usize) {
        factors[i] = if comptime!(granularity.is_mx()) {
            f32::reinterpret(e8m0_inverse_bits_of(words[i], byte))
        } else if comptime!(granularity.is_blocks()) {
            f32::reinterpret(scales[i])
        } else {
            1.0f32.runtime()
        };
    }
    factors
}
