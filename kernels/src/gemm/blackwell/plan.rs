//! Tile and split of a GEMM on Blackwell, by an estimate of its cycles from the shape alone.
//!
//! ```text
//! step   = max(128 · cols · 128 / 8192,  shared bytes / 128)      cycles per 128 of the contraction
//! item   = max(steps · step, epilogue)                            cycles of a tile: the last one's epilogue runs beside it
//! total  = ceil(items / SMs) · item + epilogue + (splits > 1) · combine
//! ```
//!
//! Where the warps that store tiles add up the sums of each 128, they do nothing beside that, so that an item takes
//! `steps · step + epilogue`. Their one or two operations for each sum, 256 cycles for 128 columns, are fewer than shared memory takes.
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

/// The same where sums are added up in registers, one for each column of a thread's row.
const PROMOTED_COLS: [usize; 2] = [128, 64];

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

/// What applies the scales.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Scaling {
    /// The epilogue: they are of tensors and rows.
    Epilogue,
    /// The tensor cores: they are of blocks of 32.
    TensorCores,
    /// The warps that store tiles, which add the sums of each 128 of the contraction times their scales to f32 registers; all columns
    /// of a tile share that of B.
    EachStep,
    /// The same with a scale of B for each column.
    EachStepByColumn,
}

impl Scaling {
    /// Whether scales change every 128 of the contraction.
    pub(super) const fn is_promoted(self) -> bool {
        matches!(self, Scaling::EachStep | Scaling::EachStepByColumn)
    }

    /// Columns that a tile may have.
    const fn cols(self) -> &'static [usize] {
        match self {
            Scaling::Epilogue => &PLAIN_COLS,
            Scaling::TensorCores => &SCALED_COLS,
            Scaling::EachStep | Scaling::EachStepByColumn => &PROMOTED_COLS,
        }
    }
}

/// How a GEMM is cut up.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Plan {
    /// Columns of a tile.
    pub(super) cols: usize,
    /// Parts of the contraction that are summed apart.
    pub(super) splits: usize,
}

impl Plan {
    /// The plan of least cycles for `[m, n, k]` on `SMs`; of equal ones the wider tile and the fewer splits.
    pub(super) fn new([m, n, k]: [usize; 3], sms: usize, scaling: Scaling) -> Self {
        let cols = scaling.cols().iter();
        let candidates = cols.flat_map(|&cols| [1, 2, 4, 8, 16].into_iter().map(move |splits| Plan { cols, splits }));
        let possible = candidates.filter(|plan| plan.splits == 1 || plan.may_split([m, n, k]));
        possible.min_by_key(|plan| plan.cycles([m, n, k], sms, scaling)).expect("one split is possible")
    }

    /// The same for a matrix of so many rows and columns, a group of them or a group of the contraction; nothing is split.
    pub(super) fn grouped(groups: &Groups, [m, n, k]: [usize; 3], sms: usize, scaling: Scaling) -> Self {
        let k = match groups.grouping {
            Grouping::Rows => k,
            Grouping::Contraction => k.div_ceil(groups.count),
        };
        let rows = groups.row_tiles(m, ROWS) * ROWS;
        let plans = scaling.cols().iter().map(|&cols| Plan { cols, splits: 1 });
        plans.min_by_key(|plan| plan.cycles([rows, n, k], sms, scaling)).expect("a width")
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

    fn cycles(&self, [m, n, k]: [usize; 3], sms: usize, scaling: Scaling) -> usize {
        let waves = self.items(m, n).div_ceil(sms);
        let steps = k.div_ceil(STEP).div_ceil(self.splits);
        // Written by TMA, then read by the tensor cores.
        let moved = 2 * (ROWS + self.cols) * STEP;
        let step = (ROWS * self.cols * STEP / 8192).max(moved / 128);
        let epilogue = EPILOGUE + ROWS * self.cols / STORED_PER_CYCLE;
        // Partial sums are written and read once.
        let combine = LAUNCH + 2 * 4 * self.splits * m * n / (sms * MEMORY_PER_CYCLE);
        let tiles = if scaling.is_promoted() {
            waves * (steps * step + epilogue)
        } else {
            waves * (steps * step).max(epilogue) + epilogue
        };
        if self.splits > 1 { tiles + combine } else { tiles }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const B200: usize = 148;
    const SCALINGS: [Scaling; 4] =
        [Scaling::Epilogue, Scaling::TensorCores, Scaling::EachStep, Scaling::EachStepByColumn];

    #[test]
    fn large_gemms_take_the_widest_tile() {
        for shape in [[4096; 3], [8192; 3], [16384; 3], [8192, 14336, 4096]] {
            for (scaling, cols) in SCALINGS.into_iter().zip([256, 192, 128, 128]) {
                assert_eq!(Plan::new(shape, B200, scaling), Plan { cols, splits: 1 }, "{shape:?}");
            }
        }
    }

    #[test]
    fn few_columns_take_narrow_tiles() {
        for scaling in SCALINGS {
            assert_eq!(Plan::new([16384, 48, 1024], B200, scaling).cols, 64);
        }
    }

    #[test]
    fn small_outputs_of_long_contractions_are_split() {
        for scaling in SCALINGS {
            let plan = Plan::new([256, 256, 65536], B200, scaling);
            assert!(plan.splits >= 8, "{plan:?}");
            assert_eq!(Plan::new([256, 256, 256], B200, scaling).splits, 1);
        }
    }

    #[test]
    fn every_item_has_work() {
        for m in [1, 63, 128, 129, 1000, 4096] {
            for n in [1, 64, 100, 257, 5000] {
                for k in [1, 128, 500, 4096, 100_000] {
                    for scaling in SCALINGS {
                        let plan = Plan::new([m, n, k], B200, scaling);
                        assert!(plan.splits <= k.div_ceil(STEP), "{plan:?}");
                        assert!(plan.padded_rows(m) >= m && plan.padded_rows(m) - m < ROWS);
                    }
                }
            }
        }
    }
}
