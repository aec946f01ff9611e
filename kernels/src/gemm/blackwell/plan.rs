//! Tiles of Blackwell, what applies the scales of their sums, and the cycles that they take.
//!
//! ```text
//! step = max(128 · cols · 128 / 8192,  shared bytes / 128)      cycles per 128 of the contraction
//! ```
//!
//! Where the warps that store tiles add up the sums of each 128, they do nothing beside that, so that an epilogue does not run beside
//! the next tile's products. Their one or two operations for each sum, 256 cycles for 128 columns, are fewer than shared memory takes.
//!
//! An SM multiplies 8192 pairs of codes a cycle: NVIDIA, *Blackwell Architecture* (4.5 PFLOP/s of dense FP8, 148
//! SMs, 1.85 GHz). That shared memory moves 128 bytes a cycle as on Hopper is assumed.

use crate::gemm::tma::plan::{Machine, Tile};

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

impl Machine for Scaling {
    /// 8 TB/s, 148 SMs, 1.85 GHz.
    const MEMORY_PER_CYCLE: usize = 29;

    fn tiles(&self) -> impl Iterator<Item = Tile> {
        self.cols().iter().map(|&cols| Tile { rows: ROWS, cols })
    }

    fn cluster(&self, _: Tile, _: usize) -> usize {
        1
    }

    /// What the tensor cores take, or shared memory if that is more, which TMA writes and the tensor cores read.
    fn step_cycles(&self, tile: Tile) -> usize {
        let moved = 2 * (tile.rows + tile.cols) * STEP;
        (tile.rows * tile.cols * STEP / 8192).max(moved / 128)
    }

    /// Tensor memory holds the sums of two tiles, but not where they are added up in registers.
    fn overlaps_epilogue(&self) -> bool {
        !self.is_promoted()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gemm::tma::plan::Plan;

    const B200: usize = 148;
    const SCALINGS: [Scaling; 4] =
        [Scaling::Epilogue, Scaling::TensorCores, Scaling::EachStep, Scaling::EachStepByColumn];

    fn plan([m, n, k]: [usize; 3], scaling: Scaling) -> Plan {
        Plan::new(&scaling, [m, n], k.div_ceil(STEP), B200)
    }

    #[test]
    fn large_gemms_take_the_widest_tile() {
        for shape in [[4096; 3], [8192; 3], [16384; 3], [8192, 14336, 4096]] {
            for (scaling, cols) in SCALINGS.into_iter().zip([256, 192, 128, 128]) {
                assert_eq!(
                    plan(shape, scaling),
                    Plan { tile: Tile { rows: ROWS, cols }, cluster: 1, splits: 1 },
                    "{shape:?}"
                );
            }
        }
    }

    #[test]
    fn few_columns_take_narrow_tiles() {
        for scaling in SCALINGS {
            assert_eq!(plan([16384, 48, 1024], scaling).tile.cols, 64);
        }
    }

    #[test]
    fn small_outputs_of_long_contractions_are_split() {
        for scaling in SCALINGS {
            let split = plan([256, 256, 65536], scaling);
            assert!(split.splits >= 8, "{split:?}");
            assert_eq!(plan([256, 256, 256], scaling).splits, 1);
        }
    }

    #[test]
    fn every_item_has_work() {
        for m in [1, 63, 128, 129, 1000, 4096] {
            for n in [1, 64, 100, 257, 5000] {
                for k in [1, 128, 500, 4096, 100_000] {
                    for scaling in SCALINGS {
                        let plan = plan([m, n, k], scaling);
                        assert!(plan.splits <= k.div_ceil(STEP), "{plan:?}");
                        assert!(plan.padded_rows(m) >= m && plan.padded_rows(m) - m < ROWS);
                    }
                }
            }
        }
    }
}
