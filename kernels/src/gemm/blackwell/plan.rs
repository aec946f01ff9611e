//! Tiles on Blackwell: how their scales are applied, whether two blocks multiply them together, and
//! their cost in cycles.
//!
//! ```text
//! step         = max(128 · cols · 128 / 8192,  shared bytes / 128)      cycles per 128 of the contraction
//! shared bytes = 2 · (128 + cols / blocks) · 128                        written by TMA, read by the tensor cores
//! ```
//!
//! Two blocks of a cluster multiply 256 rows together (`.cta_group::2`), each for its tile of 128.
//! Each loads half of the rows of B, which halves the shared memory and L2 traffic for B. A
//! multicast, as on Hopper, would only halve the L2 reads. Cycles per 128 of the contraction:
//!
//! | columns | one block | two | tensor cores |
//! | --- | --- | --- | --- |
//! | 256 | 768 | 512 | 512 |
//! | 192 | 640 | 448 | 384 |
//! | 128 | 512 | 384 | 256 |
//!
//! A block works alone in these cases:
//!
//! - The output, or the average group of rows, has up to 128 rows. The second block would have
//!   none.
//! - Scales change every 128 of the contraction. Tensor memory has four buffers of 128 columns of
//!   sums, and the threads that read one signal it. In a pair they would do so every 384 cycles,
//!   half of them to the other SM.
//! - Tiles have 64 columns, as for small outputs. A pair would save a sixth of a step there, for
//!   more kernels to compile.
//!
//! If the storing warps accumulate the sums of each 128 ([`Scaling::is_promoted`]), an epilogue
//! does not overlap the next tile's products. Their one or two operations per sum take 256 cycles
//! for 128 columns. Shared memory takes 512.
//!
//! An SM multiplies 8192 pairs of codes a cycle: NVIDIA, *Blackwell Architecture* (4.5 PFLOP/s of
//! dense FP8, 148 SMs, 1.85 GHz). Assumed: shared memory moves 128 bytes a cycle, as on Hopper.

use crate::gemm::tma::maps::ROW_BYTES;
use crate::gemm::tma::plan::{GemmShape, GemmTile, Machine};

/// Contraction length of a pipeline stage, one byte per code; four blocks of 32.
pub(super) const STEP: usize = ROW_BYTES;

/// Rows of the output that a block makes at a time: the rows of a product, and the lanes of tensor
/// memory.
pub(super) const ROWS: usize = 128;

/// Tile columns, the fastest per element first. Sums of two tiles fit in the 512 columns of tensor
/// memory.
const PLAIN_COLS: [usize; 3] = [256, 128, 64];

/// Tile columns if a thread accumulates its row in registers, one per column.
const PROMOTED_COLS: [usize; 2] = [128, 64];

/// Tile columns if scales take columns of tensor memory. A tile starts at a multiple of 64, so that
/// its scales start at an even column.
const SCALED_COLS: [usize; 3] = [192, 128, 64];

/// Minimum columns of a tile that two blocks make together.
const MIN_PAIR_COLS: usize = 128;

/// Stage of the kernel that applies scales.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Scaling {
    /// In the epilogue: scales per tensor or per row.
    Epilogue,
    /// By the tensor cores: E8M0 scales of blocks of 32.
    TensorCores,
    /// By the warps that store tiles. They scale the sums of each 128 of the contraction and add
    /// them to f32 registers. All columns of a tile share one scale of B.
    EachStep,
    /// Like [`EachStep`](Self::EachStep), with a scale of B for each column.
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

    /// Possible columns of a tile.
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

    fn tiles(&self) -> impl Iterator<Item = GemmTile> {
        self.cols().iter().map(|&cols| GemmTile { rows: ROWS, cols })
    }

    fn clusters(&self, tile: GemmTile, m: usize) -> &'static [usize] {
        if self.is_promoted() || m <= tile.rows || tile.cols < MIN_PAIR_COLS { &[1] } else { &[2, 1] }
    }

    /// Cycles of the tensor cores, or of shared memory traffic (TMA writes, tensor core reads) if
    /// more.
    fn step_cycles(&self, tile: GemmTile, cluster: usize) -> usize {
        let moved = 2 * (tile.rows + tile.cols / cluster) * STEP;
        (tile.rows * tile.cols * STEP / 8192).max(moved / 128)
    }

    /// Tensor memory holds the sums of two tiles, unless they accumulate in registers.
    fn overlaps_epilogue(&self) -> bool {
        !self.is_promoted()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Checks the table in the module docs.
    #[test]
    fn two_blocks_move_half_of_b() {
        for (cols, alone, pair) in [(256, 768, 512), (192, 640, 448), (128, 512, 384)] {
            let cycles = |cluster| Scaling::Epilogue.step_cycles(GemmTile { rows: ROWS, cols }, cluster);
            assert_eq!([cycles(1), cycles(2)], [alone, pair], "{cols} columns");
        }
    }
}
