//! Tile and split of a GEMM on Blackwell, by an estimate of its cycles from the shape alone.
//!
//! ```text
//! step   = max(128 · cols · 128 / 8192,  shared bytes / 128)      cycles per 128 of the contraction
//! item   = max(steps · step, epilogue)                            cycles of a tile: the last one's epilogue runs beside it
//! total  = ceil(items / SMs) · item + epilogue + (splits > 1) · combine
//! ```
//!
//! An SM multiplies 8192 pairs of codes a cycle: NVIDIA, *Blackwell Architecture* (4.5 PFLOP/s of dense FP8, 148
//! SMs, 1.85 GHz). That shared memory moves 128 bytes a cycle as on Hopper, and what an epilogue and a launch cost,
//! is assumed.

use crate::gemm::grouped::{Grouping, Groups};
use crate::view::MAX_INDEX;

/// Length of the contraction in a pipeline stage: a row of 128 bytes, what the swizzle spans, and four blocks of 32.
pub(super) const STEP: usize = 128;

/// Rows of the output that a block makes at a time: those of a product, and the lanes of tensor memory.
pub(super) const ROWS: usize = 128;

/// Tiles' columns, the fastest per element first. Sums of two tiles fit in the 512 columns of tensor memory.
const PLAIN_COLS: [usize; 3] = [256, 128, 64];

/// The same where scales need columns of their own. A tile begins at a multiple of 64, so that its scales do at an even column.
const SCALED_COLS: [usize; 3] = [192, 128, 64];

/// Cycles of an epilogue but for its stores.
const EPILOGUE: usize = 600;

/// Elements of the output that a block stores per cycle.
const STORED_PER_CYCLE: usize = 32;

/// Cycles of a second launch that waits for the first.
const LAUNCH: usize = 4000;

/// Bytes of device memory per cycle and SM: 8 TB/s, 148 SMs, 1.85 GHz.
const MEMORY_PER_CYCLE: usize = 29;

/// Fewest steps that are worth a split of their own.
const MIN_STEPS: usize = 4;

/// How a GEMM is cut up.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Plan {
    /// Columns of a tile.
    pub(super) cols: usize,
    /// Parts of the contraction that are summed apart.
    pub(super) splits: usize,
}

impl Plan {
    /// The plan of least cycles for `[m, n, k]` on `SMs`, with scales of blocks or without; of equal ones the wider
    /// tile and the fewer splits.
    pub(super) fn new([m, n, k]: [usize; 3], sms: usize, block_scaled: bool) -> Self {
        let cols = if block_scaled { SCALED_COLS } else { PLAIN_COLS };
        let candidates =
            cols.into_iter().flat_map(|cols| [1, 2, 4, 8, 16].into_iter().map(move |splits| Plan { cols, splits }));
        let possible = candidates.filter(|plan| plan.splits == 1 || plan.may_split([m, n, k]));
        possible.min_by_key(|plan| plan.cycles([m, n, k], sms)).expect("one split is possible")
    }

    /// The same for a matrix of so many rows and columns, a group of them or a group of the contraction; nothing is split.
    pub(super) fn grouped(groups: &Groups, [m, n, k]: [usize; 3], sms: usize, block_scaled: bool) -> Self {
        let k = match groups.grouping {
            Grouping::Rows => k,
            Grouping::Contraction => k.div_ceil(groups.count),
        };
        let rows = groups.row_tiles(m, ROWS) * ROWS;
        let cols = if block_scaled { SCALED_COLS } else { PLAIN_COLS };
        let plans = cols.into_iter().map(|cols| Plan { cols, splits: 1 });
        plans.min_by_key(|plan| plan.cycles([rows, n, k], sms)).expect("a width")
    }

    /// Rows of the output with those of all tiles.
    pub(super) fn padded_rows(&self, m: usize) -> usize {
        m.next_multiple_of(ROWS)
    }

    /// Tiles' shares of the contraction.
    pub(super) fn items(&self, m: usize, n: usize) -> usize {
        m.div_ceil(ROWS) * n.div_ceil(self.cols) * self.splits
    }

    fn may_split(&self, [m, n, k]: [usize; 3]) -> bool {
        let partials = (self.splits * self.padded_rows(m)) as u64 * n.next_multiple_of(4) as u64;
        k.div_ceil(STEP) >= self.splits * MIN_STEPS && partials <= MAX_INDEX
    }

    fn cycles(&self, [m, n, k]: [usize; 3], sms: usize) -> usize {
        let waves = self.items(m, n).div_ceil(sms);
        let steps = k.div_ceil(STEP).div_ceil(self.splits);
        // Written by TMA, then read by the tensor cores.
        let moved = 2 * (ROWS + self.cols) * STEP;
        let step = (ROWS * self.cols * STEP / 8192).max(moved / 128);
        let epilogue = EPILOGUE + ROWS * self.cols / STORED_PER_CYCLE;
        // Partial sums are written and read once.
        let combine = LAUNCH + 2 * 4 * self.splits * m * n / (sms * MEMORY_PER_CYCLE);
        let tiles = waves * (steps * step).max(epilogue) + epilogue;
        if self.splits > 1 { tiles + combine } else { tiles }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const B200: usize = 148;

    #[test]
    fn large_gemms_take_the_widest_tile() {
        for shape in [[4096; 3], [8192; 3], [16384; 3], [8192, 14336, 4096]] {
            assert_eq!(Plan::new(shape, B200, false), Plan { cols: 256, splits: 1 }, "{shape:?}");
            assert_eq!(Plan::new(shape, B200, true), Plan { cols: 192, splits: 1 }, "{shape:?}");
        }
    }

    #[test]
    fn few_columns_take_narrow_tiles() {
        for block_scaled in [false, true] {
            assert_eq!(Plan::new([16384, 48, 1024], B200, block_scaled).cols, 64);
        }
    }

    #[test]
    fn small_outputs_of_long_contractions_are_split() {
        for block_scaled in [false, true] {
            let plan = Plan::new([256, 256, 65536], B200, block_scaled);
            assert!(plan.splits >= 8, "{plan:?}");
            assert_eq!(Plan::new([256, 256, 256], B200, block_scaled).splits, 1);
        }
    }

    #[test]
    fn every_item_has_work() {
        for m in [1, 63, 128, 129, 1000, 4096] {
            for n in [1, 64, 100, 257, 5000] {
                for k in [1, 128, 500, 4096, 100_000] {
                    for block_scaled in [false, true] {
                        let plan = Plan::new([m, n, k], B200, block_scaled);
                        assert!(plan.splits <= k.div_ceil(STEP), "{plan:?}");
                        assert!(plan.padded_rows(m) >= m && plan.padded_rows(m) - m < ROWS);
                    }
                }
            }
        }
    }
}
