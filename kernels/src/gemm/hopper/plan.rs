//! Tiles and clusters of Hopper, and the cycles that they take.
//!
//! ```text
//! step = max(rows · cols · 128 / 4096,  shared bytes / 128)     cycles per 128 bytes of the contraction
//! ```
//!
//! An SM multiplies 4096 pairs of codes a cycle, or 2048 of bf16, which have twice the bytes, and moves 128 bytes of shared memory: NVIDIA, *H100 Tensor Core
//! GPU Architecture* (1979 TFLOP/s, 132 SMs, 1.83 GHz).
//!
//! What a cluster saves, reads of L2, is not in these cycles, so that shapes alone say whether there is one. A group of `r` rows
//! that begins anywhere has rows in `1 + r / rows` tiles along M, and in as many as `2 + r / rows` of clusters of two. L2 brings each of
//! them, a step,
//!
//! ```text
//! alone     (1 + r / rows) · (rows + cols)     · 128 bytes
//! clusters  (2 + r / rows) · (rows + cols / 2) · 128 bytes,      which is less if  r > 2 · rows² / cols
//! ```
//!
//! of 128 by 256 more than 128 rows, of 128 by 128 more than 256. The tensor cores multiply a tile more a group: at 16 tiles a group 6%,
//! for a third less to read.

use crate::Granularity;
use crate::gemm::tma::maps::ROW_BYTES;
use crate::gemm::tma::plan::{GemmShape, Machine, Tile};

/// Rows of a product of one warpgroup.
pub(super) const MMA_ROWS: usize = 64;

/// Warpgroups that multiply.
pub(super) const CONSUMERS: usize = 2;

/// Widest product whose sums fit in registers beside those of the whole tile.
const MAX_PROMOTED_COLS: usize = 128;

/// Where the sums of a step go.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Promotion {
    /// They stay in the accumulators of `wgmma`.
    Never,
    /// They are added to f32 registers.
    EachStep,
    /// They are scaled and added to f32 registers; the columns of a product share one scale of B.
    EachStepScaled,
    /// They are scaled and added to f32 registers; each column has its scale of B.
    EachStepByColumn,
}

impl Promotion {
    pub(super) const fn of(shape: &GemmShape) -> Self {
        match shape.by_block() {
            true if shape.scales_b_differ() => Self::EachStepByColumn,
            true => Self::EachStepScaled,
            // Elements of bf16 have their scales in them, and their sums need no promotion.
            false if shape.use_fast_accum || Granularity::any_mx(shape.granularities) => Self::Never,
            false => Self::EachStep,
        }
    }

    /// Whether scales change along the contraction.
    pub(super) const fn is_scaled(self) -> bool {
        matches!(self, Promotion::EachStepScaled | Promotion::EachStepByColumn)
    }
}

/// From the fastest per element to the smallest.
pub(super) const TILES: [Tile; 5] = [
    Tile { rows: 128, cols: 256 },
    Tile { rows: 128, cols: 128 },
    Tile { rows: 64, cols: 256 },
    Tile { rows: 64, cols: 128 },
    Tile { rows: 128, cols: 64 },
];

/// Warpgroups along M; the others lie along N.
pub(super) const fn row_groups(tile: Tile) -> usize {
    tile.rows / MMA_ROWS
}

/// Columns of one warpgroup.
pub(super) const fn group_cols(tile: Tile) -> usize {
    tile.cols * row_groups(tile) / CONSUMERS
}

/// Columns of one product.
pub(super) const fn mma_cols(tile: Tile, promotion: Promotion) -> usize {
    match promotion {
        Promotion::Never => group_cols(tile),
        _ if group_cols(tile) > MAX_PROMOTED_COLS => MAX_PROMOTED_COLS,
        _ => group_cols(tile),
    }
}

/// f32 registers of a thread for the sums of the tile and those of one product: 192 at most, of the 232 that it has, or 224 where
/// scales are fetched.
pub(super) const fn sum_registers(tile: Tile, promotion: Promotion) -> usize {
    let (sums, cols) = (group_cols(tile) / 2, mma_cols(tile, promotion));
    if matches!(promotion, Promotion::Never) { sums } else { sums + cols / 2 }
}

impl Machine for Promotion {
    /// 4.8 TB/s, 132 SMs, 1.75 GHz.
    const MEMORY_PER_CYCLE: usize = 20;

    fn tiles(&self) -> impl Iterator<Item = Tile> {
        TILES.into_iter()
    }

    /// Two blocks share B where there are two and at most one in eight multiplies rows that do not exist.
    fn clusters(&self, tile: Tile, m: usize) -> &'static [usize] {
        let tiles = m.div_ceil(tile.rows);
        if tiles.is_multiple_of(2) || tiles > 7 { &[2] } else { &[1] }
    }

    /// Two blocks share B where a group has rows for two and L2 then brings fewer bytes.
    fn group_clusters(&self, tile: Tile, rows: usize) -> &'static [usize] {
        if rows > tile.rows.max(2 * tile.rows * tile.rows / tile.cols) { &[2] } else { &[1] }
    }

    /// What the tensor cores take, or shared memory if that is more; a cluster saves reads of L2 alone.
    fn step_cycles(&self, tile: Tile, _: usize) -> usize {
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

    /// The least rows at which L2 brings fewer bytes, as the module says, if the group has more rows than a block makes.
    #[test]
    fn groups_share_b_where_that_saves_reads() {
        for tile in TILES {
            for rows in 1..1024 {
                let [alone, shared] = [1, 2].map(|blocks| {
                    // In units of 128 bytes over the tile's rows, which all counts are fractions of.
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
