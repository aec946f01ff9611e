//! Tiles and clusters on Hopper, and their cost in cycles.
//!
//! ```text
//! step = max(rows · cols · 128 / 4096,  shared bytes / 128)     cycles per 128 bytes of the contraction
//! ```
//!
//! An SM multiplies 4096 pairs of codes a cycle, or 2048 pairs of bf16, which have twice the bytes.
//! It moves 128 bytes of shared memory a cycle: NVIDIA, *H100 Tensor Core GPU Architecture* (1979
//! TFLOP/s, 132 SMs, 1.83 GHz).
//!
//! Clusters save reads of L2, which these cycles do not include. So only shapes decide whether to
//! use one. A group of `r` rows that starts anywhere has rows in `1 + r / rows` tiles along M. With
//! clusters of two it has rows in up to `2 + r / rows` tiles. L2 reads per step:
//!
//! ```text
//! alone     (1 + r / rows) · (rows + cols)     · 128 bytes
//! clusters  (2 + r / rows) · (rows + cols / 2) · 128 bytes,      which is less if  r > 2 · rows² / cols
//! ```
//!
//! For tiles of 128 by 256 that is more than 128 rows, for 128 by 128 more than 256. The tensor
//! cores multiply one more tile per group: 6% more at 16 tiles per group, for a third fewer reads.

use crate::Granularity;
use crate::gemm::tma::maps::ROW_BYTES;
use crate::gemm::tma::plan::{GemmShape, GemmTile, Machine};

/// Rows of a product of one warpgroup.
pub(super) const MMA_ROWS: usize = 64;

/// Warpgroups that multiply.
pub(super) const CONSUMERS: usize = 2;

/// Widest product whose sums fit in registers next to the whole tile's sums.
const MAX_PROMOTED_COLS: usize = 128;

/// Destination of a step's sums.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Promotion {
    /// Kept in the accumulators of `wgmma`.
    Never,
    /// Added to f32 registers.
    EachStep,
    /// Scaled and added to f32 registers. The columns of a product share one scale of B.
    EachStepScaled,
    /// Scaled and added to f32 registers. Each column has a scale of B.
    EachStepByColumn,
}

impl Promotion {
    pub(super) const fn of(shape: &GemmShape) -> Self {
        match shape.by_block() {
            true if shape.scales_b_differ() => Self::EachStepByColumn,
            true => Self::EachStepScaled,
            // bf16 elements include their scales, and their sums need no promotion.
            false if shape.use_fast_accum || Granularity::any_mx(shape.granularities) => Self::Never,
            false => Self::EachStep,
        }
    }

    /// Whether scales change along the contraction.
    pub(super) const fn is_scaled(self) -> bool {
        matches!(self, Promotion::EachStepScaled | Promotion::EachStepByColumn)
    }
}

/// Tiles, from the fastest per element to the smallest.
pub(super) const TILES: [GemmTile; 5] = [
    GemmTile { rows: 128, cols: 256 },
    GemmTile { rows: 128, cols: 128 },
    GemmTile { rows: 64, cols: 256 },
    GemmTile { rows: 64, cols: 128 },
    GemmTile { rows: 128, cols: 64 },
];

/// Number of warpgroups along M; the others are along N.
pub(super) const fn row_groups(tile: GemmTile) -> usize {
    tile.rows / MMA_ROWS
}

/// Columns of one warpgroup.
pub(super) const fn group_cols(tile: GemmTile) -> usize {
    tile.cols * row_groups(tile) / CONSUMERS
}

/// Columns of one product.
pub(super) const fn mma_cols(tile: GemmTile, promotion: Promotion) -> usize {
    match promotion {
        Promotion::Never => group_cols(tile),
        _ if group_cols(tile) > MAX_PROMOTED_COLS => MAX_PROMOTED_COLS,
        _ => group_cols(tile),
    }
}

/// f32 registers of a thread for the sums of the tile and of one product. At most 192, of 232
/// available, or 224 if scales are fetched.
pub(super) const fn sum_registers(tile: GemmTile, promotion: Promotion) -> usize {
    let (sums, cols) = (group_cols(tile) / 2, mma_cols(tile, promotion));
    if matches!(promotion, Promotion::Never) { sums } else { sums + cols / 2 }
}

impl Machine for Promotion {
    /// 4.8 TB/s, 132 SMs, 1.75 GHz.
    const MEMORY_PER_CYCLE: usize = 20;

    fn tiles(&self) -> impl Iterator<Item = GemmTile> {
        TILES.into_iter()
    }

    /// Two blocks share B if the tile rows pair up, or if at most one tile in eight has no existing
    /// rows.
    fn clusters(&self, tile: GemmTile, m: usize) -> &'static [usize] {
        let tiles = m.div_ceil(tile.rows);
        if tiles.is_multiple_of(2) || tiles > 7 { &[2] } else { &[1] }
    }

    /// Two blocks share B if a group has enough rows for two and L2 then reads fewer bytes.
    fn group_clusters(&self, tile: GemmTile, rows: usize) -> &'static [usize] {
        if rows > tile.rows.max(2 * tile.rows * tile.rows / tile.cols) { &[2] } else { &[1] }
    }

    /// Cycles of the tensor cores, or of shared memory if more. A cluster only saves reads of L2.
    fn step_cycles(&self, tile: GemmTile, _: usize) -> usize {
        let cols = mma_cols(tile, *self);
        let products = CONSUMERS * group_cols(tile) / cols;
        let read = products * (MMA_ROWS + cols) * ROW_BYTES;
        let written = (tile.rows + tile.cols) * ROW_BYTES;
        (tile.rows * tile.cols * ROW_BYTES / 4096).max((read + written) / 128)
    }

    /// The warpgroups that multiply also store.
    fn overlaps_epilogue(&self) -> bool {
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Checks the row count of the module docs from which L2 reads fewer bytes, for groups with
    /// more rows than one block makes.
    #[test]
    fn groups_share_b_where_that_saves_reads() {
        for tile in TILES {
            for rows in 1..1024 {
                let [alone, shared] = [1, 2].map(|blocks| {
                    // In units of 128 bytes divided by the tile's rows, the common denominator.
                    (blocks * tile.rows + rows) * (tile.rows + tile.cols / blocks)
                });
                let want = if rows > tile.rows && shared < alone { 2 } else { 1 };
                assert_eq!(Promotion::EachStep.group_clusters(tile, rows), [want], "{tile:?}, {rows} rows");
            }
        }
    }

    #[test]
    fn sums_fit_in_registers() {
        for tile in TILES {
            assert_eq!(CONSUMERS * group_cols(tile) * MMA_ROWS, tile.rows * tile.cols);
            assert!(sum_registers(tile, Promotion::EachStepByColumn) <= 192, "{tile:?}");
        }
    }
}
