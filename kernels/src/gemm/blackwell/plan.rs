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
use crate::gemm::tma::plan::{GemmShape, Machine, Tile};

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
    pub(super) const fn of(shape: &GemmShape) -> Self {
        match shape.by_block() {
            true if shape.power_of_two => Self::TensorCores,
            true if shape.scales_b_differ() => Self::EachStepByColumn,
            true => Self::EachStep,
            false if shape.granularities[0].is_mx() => Self::TensorCores,
            false => Self::Epilogue,
        }
    }

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

    /// As the table of the module says.
    #[test]
    fn two_blocks_move_half_of_b() {
        for (cols, alone, pair) in [(256, 768, 512), (192, 640, 448), (128, 512, 384)] {
            let cycles = |cluster| Scaling::Epilogue.step_cycles(Tile { rows: ROWS, cols }, cluster);
            assert_eq!([cycles(1), cycles(2)], [alone, pair], "{cols} columns");
        }
    }
}
