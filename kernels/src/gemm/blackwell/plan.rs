//! Tiles of Blackwell, what applies the scales of their sums, whether two blocks multiply them together, and the cycles that they
//! take.
//!
//! ```text
//! step         = max(128 · cols · 128 / 8192,  shared bytes / 128)      cycles per 128 of the contraction
//! shared bytes = 2 · (128 + cols / blocks) · 128                        written by TMA, read by the tensor cores
//! ```
//!
//! Two blocks of a cluster multiply 256 rows together (`.cta_group::2`), each for its tile of 128. Each brings half of the rows of B,
//! which halves what its shared memory and L2 move for B; a multicast, as on Hopper, would halve the reads of L2 alone:
//!
//! | columns | one block | two | tensor cores |
//! | --- | --- | --- | --- |
//! | 256 | 768 | 512 | 512 |
//! | 192 | 640 | 448 | 384 |
//! | 128 | 512 | 384 | 256 |
//!
//! A block stays alone
//!
//! - for an output, or groups of rows on average, of up to 128 rows, where the other would have none;
//! - where scales change every 128 of the contraction: four sums of 128 columns are apart in tensor memory, and the threads that read
//!   one say so every 384 cycles. In a pair half of these arrivals would cross to the other SM;
//! - in tiles of 64 columns, which small outputs take: a pair would save a sixth of a step there, for more kernels to compile.
//!
//! Where the warps that store tiles add up the sums of each 128, they do nothing beside that, so that an epilogue does not run beside
//! the next tile's products. Their one or two operations for each sum, 256 cycles for 128 columns, are fewer than the 512 that shared
//! memory takes.
//!
//! An SM multiplies 8192 pairs of codes a cycle: NVIDIA, *Blackwell Architecture* (4.5 PFLOP/s of dense FP8, 148
//! SMs, 1.85 GHz). That shared memory moves 128 bytes a cycle as on Hopper is assumed.

use crate::gemm::tma::maps::ROW_BYTES;
use crate::gemm::tma::plan::{Machine, Tile};

/// Length of the contraction in a pipeline stage, a byte each; four blocks of 32.
pub(super) const STEP: usize = ROW_BYTES;

/// Rows of the output that a block makes at a time: those of a product, and the lanes of tensor memory.
pub(super) const ROWS: usize = 128;

/// Tiles' columns, the fastest per element first. Sums of two tiles fit in the 512 columns of tensor memory.
const PLAIN_COLS: [usize; 3] = [256, 128, 64];

/// Tiles' columns where sums are added up in registers, one for each column of a thread's row.
const PROMOTED_COLS: [usize; 2] = [128, 64];

/// Tiles' columns where scales need columns of tensor memory. A tile begins at a multiple of 64, so that its scales do at an even column.
const SCALED_COLS: [usize; 3] = [192, 128, 64];

/// Fewest columns of a tile that two blocks make together.
const MIN_PAIR_COLS: usize = 128;

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
    /// As [`EachStep`](Self::EachStep), with a scale of B for each column.
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

    fn clusters(&self, tile: Tile, m: usize) -> &'static [usize] {
        if self.is_promoted() || m <= tile.rows || tile.cols < MIN_PAIR_COLS { &[1] } else { &[2, 1] }
    }

    /// What the tensor cores take, or shared memory if that is more, which TMA writes and the tensor cores read.
    fn step_cycles(&self, tile: Tile, cluster: usize) -> usize {
        let moved = 2 * (tile.rows + tile.cols / cluster) * STEP;
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
    use crate::gemm::grouped::Grouping;
    use crate::gemm::tma::plan::Plan;

    const B200: usize = 148;
    const SCALINGS: [Scaling; 4] =
        [Scaling::Epilogue, Scaling::TensorCores, Scaling::EachStep, Scaling::EachStepByColumn];

    fn plan([m, n, k]: [usize; 3], scaling: Scaling) -> Plan {
        Plan::new(&scaling, [m, n], k.div_ceil(STEP), B200)
    }

    #[test]
    fn large_gemms_take_the_widest_tile_in_pairs() {
        for shape in [[4096; 3], [8192; 3], [16384; 3], [8192, 14336, 4096]] {
            for (scaling, (cols, cluster)) in SCALINGS.into_iter().zip([(256, 2), (192, 2), (128, 1), (128, 1)]) {
                assert_eq!(
                    plan(shape, scaling),
                    Plan { tile: Tile { rows: ROWS, cols }, cluster, splits: 1 },
                    "{shape:?}"
                );
            }
        }
    }

    /// As the table of the module says.
    #[test]
    fn two_blocks_move_half_of_b() {
        for (cols, alone, pair) in [(256, 768, 512), (192, 640, 448), (128, 512, 384)] {
            let cycles = |cluster| Scaling::Epilogue.step_cycles(Tile { rows: ROWS, cols }, cluster);
            assert_eq!([cycles(1), cycles(2)], [alone, pair], "{cols} columns");
        }
    }

    #[test]
    fn few_rows_take_no_pairs() {
        for scaling in SCALINGS {
            for m in [1, 64, 128] {
                assert_eq!(plan([m, 65536, 4096], scaling).cluster, 1);
            }
        }
    }

    /// An odd number of tiles along M leaves the last pair a block without rows.
    #[test]
    fn odd_numbers_of_tiles_take_pairs_where_that_is_faster() {
        let pairs = Plan { tile: Tile { rows: ROWS, cols: 256 }, cluster: 2, splits: 1 };
        // 147 tiles are one round on 148 SMs, and so are their 74 pairs, which take fewer cycles a step.
        assert_eq!(pairs.items(147 * ROWS, 256), B200 / 2);
        assert_eq!(plan([147 * ROWS, 256, 4096], Scaling::Epilogue), pairs);
        // 3 by 49 tiles are one round too, but their 98 pairs are two.
        assert_eq!(pairs.items(3 * ROWS, 49 * 256), 98);
        assert_eq!(plan([3 * ROWS, 49 * 256, 4096], Scaling::Epilogue), Plan { cluster: 1, ..pairs });
    }

    /// The shapes of the interpreted GEMMs of pairs, on so many SMs, and what they are to show: columns, clusters' tiles, splits.
    #[test]
    fn small_machines_take_pairs_too() {
        for (shape, sms, [plain, mx]) in [
            ([260, 260, 1000], 2, [[256, 4, 1], [192, 4, 1]]),
            ([390, 516, 140], 4, [[256, 6, 1], [192, 6, 1]]),
            ([129, 201, 31], 4, [[128, 2, 1], [128, 2, 1]]),
            ([130, 67, 4100], 8, [[128, 4, 4], [128, 4, 4]]),
        ] {
            let [m, n, k] = shape;
            for (scaling, want) in [(Scaling::Epilogue, plain), (Scaling::TensorCores, mx)] {
                let plan = Plan::new(&scaling, [m, n], k.div_ceil(STEP), sms);
                assert_eq!((plan.cluster, [plan.tile.cols, plan.items(m, n), plan.splits]), (2, want), "{shape:?}");
            }
        }
    }

    #[test]
    fn large_grouped_gemms_take_the_widest_tile_in_pairs() {
        let plan = |scaling: Scaling, grouping, [m, n, k]: [usize; 3]| {
            Plan::grouped(&scaling, grouping, 8, [m, n], k.div_ceil(STEP), B200)
        };
        for (grouping, shape) in [
            (Grouping::Rows, [16384, 14336, 4096]),
            (Grouping::Rows, [16384, 4096, 14336]),
            (Grouping::Contraction, [14336, 4096, 16384]),
        ] {
            for (scaling, (cols, cluster)) in SCALINGS.into_iter().zip([(256, 2), (192, 2), (128, 1), (128, 1)]) {
                let want = Plan { tile: Tile { rows: ROWS, cols }, cluster, splits: 1 };
                assert_eq!(plan(scaling, grouping, shape), want, "{shape:?}");
            }
        }
        for scaling in SCALINGS {
            assert_eq!(plan(scaling, Grouping::Rows, [8 * ROWS, 14336, 4096]).cluster, 1, "{ROWS} rows a group");
        }
    }

    /// The shapes of the interpreted grouped GEMMs of pairs, on so many SMs, and their columns, plain and with scales of 1 x 32.
    #[test]
    fn groups_take_pairs_on_small_machines() {
        for (grouping, count, [m, n, k], sms, [plain, mx]) in [
            (Grouping::Rows, 4, [520, 130, 300], 2, [256, 192]),
            (Grouping::Rows, 2, [260, 66, 1000], 2, [128, 128]),
            (Grouping::Rows, 4, [520, 200, 300], 8, [256, 128]),
            (Grouping::Rows, 1, [250, 66, 160], 2, [128, 128]),
            (Grouping::Contraction, 5, [130, 258, 512], 4, [256, 192]),
            (Grouping::Contraction, 3, [200, 130, 583], 2, [256, 192]),
        ] {
            for (scaling, cols) in [(Scaling::Epilogue, plain), (Scaling::TensorCores, mx)] {
                let plan = Plan::grouped(&scaling, grouping, count, [m, n], k.div_ceil(STEP), sms);
                let want = Plan { tile: Tile { rows: ROWS, cols }, cluster: 2, splits: 1 };
                assert_eq!(plan, want, "{scaling:?}, {count} groups, [{m}, {n}, {k}]");
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
                        let padding = plan.padded_rows(m) - m;
                        assert!(padding < ROWS * plan.cluster && (plan.cluster == 1 || m > ROWS), "{plan:?}");
                    }
                }
            }
        }
    }
}
