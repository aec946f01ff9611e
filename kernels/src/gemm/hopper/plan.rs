//! Tile, cluster and split of a GEMM on Hopper, by an estimate of its cycles from the shape alone.
//!
//! ```text
//! step   = max(rows · cols · 128 / 4096,  shared bytes / 128)     cycles per 128 bytes of the contraction
//! item   = steps · step + epilogue                                cycles of a tile, or of its share of the contraction
//! total  = ceil(items / blocks that run at once) · item + (splits > 1) · combine
//! ```
//!
//! An SM multiplies 4096 pairs of codes a cycle, or 2048 of bf16, which have twice the bytes, and moves 128 bytes of shared memory: NVIDIA, *H100 Tensor Core
//! GPU Architecture* (1979 TFLOP/s, 132 SMs, 1.83 GHz). What an epilogue and a launch cost is assumed.

use crate::gemm::grouped::{Grouping, Groups};
use crate::gemm::maps::ROW_BYTES;
use crate::view::MAX_INDEX;

/// Rows of a product of one warpgroup.
pub(super) const MMA_ROWS: usize = 64;

/// Warpgroups that multiply.
pub(super) const CONSUMERS: usize = 2;

/// Widest product whose sums fit in registers beside those of the whole tile.
const MAX_PROMOTED_COLS: usize = 128;

/// Most f32 registers of a thread for sums and scales, of the 232 that it has.
const MAX_REGISTERS: usize = 192;

/// Cycles of an epilogue but for its stores.
const EPILOGUE: usize = 600;

/// Elements of the output that a block stores per cycle.
const STORED_PER_CYCLE: usize = 32;

/// Cycles of a second launch that waits for the first.
const LAUNCH: usize = 4000;

/// Bytes of device memory per cycle and SM: 4.8 TB/s, 132 SMs, 1.75 GHz.
const MEMORY_PER_CYCLE: usize = 20;

/// Fewest steps that are worth a split of their own.
const MIN_STEPS: usize = 4;

/// Whether the sums of a step stay in the tensor cores' accumulators.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Promotion {
    /// They do.
    Never,
    /// They are added to f32 registers.
    EachStep,
    /// They are added times their scales, of which all columns of a product share that of B.
    EachStepScaled,
    /// They are added times a scale for each column, which takes registers too.
    EachStepByColumn,
}

impl Promotion {
    /// Whether scales change along the contraction.
    pub(super) const fn is_scaled(self) -> bool {
        matches!(self, Promotion::EachStepScaled | Promotion::EachStepByColumn)
    }
}

/// Rows and columns of the output that a block makes at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Tile {
    pub(super) rows: usize,
    pub(super) cols: usize,
}

/// From the fastest per element to the smallest.
pub(super) const TILES: [Tile; 5] = [
    Tile { rows: 128, cols: 256 },
    Tile { rows: 128, cols: 128 },
    Tile { rows: 64, cols: 256 },
    Tile { rows: 64, cols: 128 },
    Tile { rows: 128, cols: 64 },
];

impl Tile {
    /// Warpgroups along M; the others lie along N.
    pub(super) const fn row_groups(self) -> usize {
        self.rows / MMA_ROWS
    }

    /// Columns of one warpgroup.
    pub(super) const fn group_cols(self) -> usize {
        self.cols * self.row_groups() / CONSUMERS
    }

    /// Columns of one product.
    pub(super) const fn mma_cols(self, promotion: Promotion) -> usize {
        match promotion {
            Promotion::Never => self.group_cols(),
            _ if self.group_cols() > MAX_PROMOTED_COLS => MAX_PROMOTED_COLS,
            _ => self.group_cols(),
        }
    }

    /// f32 registers of a thread for the sums of the tile, those of one product, and the scales of its columns.
    pub(super) const fn registers(self, promotion: Promotion) -> usize {
        let (sums, cols) = (self.group_cols() / 2, self.mma_cols(promotion));
        match promotion {
            Promotion::Never => sums,
            Promotion::EachStep | Promotion::EachStepScaled => sums + cols / 2,
            Promotion::EachStepByColumn => sums + cols / 2 + cols / 4,
        }
    }

    /// Cycles of one step: what the tensor cores take, or shared memory if that is more.
    fn step_cycles(self, promotion: Promotion) -> usize {
        let products = CONSUMERS * self.group_cols() / self.mma_cols(promotion);
        let read = products * (MMA_ROWS + self.mma_cols(promotion)) * ROW_BYTES;
        let written = (self.rows + self.cols) * ROW_BYTES;
        (self.rows * self.cols * ROW_BYTES / 4096).max((read + written) / 128)
    }
}

/// How a GEMM is cut up.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Plan {
    pub(super) tile: Tile,
    /// Blocks along M that share the tiles of B: 1 or 2.
    pub(super) cluster: usize,
    /// Parts of the contraction that are summed apart.
    pub(super) splits: usize,
}

impl Plan {
    /// The plan of least cycles for an output `[m, n]` and `steps` of the contraction on `SMs`; of equal ones the
    /// larger tile and the fewer splits.
    pub(super) fn new([m, n]: [usize; 2], steps: usize, sms: usize, promotion: Promotion) -> Self {
        let candidates = tiles(promotion).flat_map(|tile| {
            [1, 2, 4, 8, 16].into_iter().map(move |splits| Plan { tile, cluster: cluster(tile, m), splits })
        });
        let possible = candidates.filter(|plan| plan.splits == 1 || plan.may_split([m, n], steps));
        possible.min_by_key(|plan| plan.cycles([m, n], steps, sms, promotion)).expect("one split is possible")
    }

    /// The same for a matrix of so many rows and columns, a group of them or a group of the contraction. Groups share no tile of B,
    /// so there are no clusters, and have a part of the contraction each or all of it, so there are no splits.
    pub(super) fn grouped(groups: &Groups, [m, n]: [usize; 2], steps: usize, sms: usize, promotion: Promotion) -> Self {
        let steps = match groups.grouping {
            Grouping::Rows => steps,
            Grouping::Contraction => steps.div_ceil(groups.count),
        };
        let rows = |tile: Tile| groups.row_tiles(m, tile.rows) * tile.rows;
        let plans = tiles(promotion).map(|tile| Plan { tile, cluster: 1, splits: 1 });
        plans.min_by_key(|plan| plan.cycles([rows(plan.tile), n], steps, sms, promotion)).expect("a tile")
    }

    /// Clusters' tiles along the rows.
    pub(super) fn row_clusters(&self, m: usize) -> usize {
        m.div_ceil(self.tile.rows * self.cluster)
    }

    /// Rows of the output with those of all tiles.
    pub(super) fn padded_rows(&self, m: usize) -> usize {
        self.row_clusters(m) * self.cluster * self.tile.rows
    }

    /// Clusters' shares of the work.
    pub(super) fn items(&self, m: usize, n: usize) -> usize {
        self.row_clusters(m) * n.div_ceil(self.tile.cols) * self.splits
    }

    fn may_split(&self, [m, n]: [usize; 2], steps: usize) -> bool {
        let partials = (self.splits * self.padded_rows(m)) as u64 * n.next_multiple_of(4) as u64;
        steps >= self.splits * MIN_STEPS && partials <= MAX_INDEX
    }

    fn cycles(&self, [m, n]: [usize; 2], steps: usize, sms: usize, promotion: Promotion) -> usize {
        let waves = self.items(m, n).div_ceil((sms / self.cluster).max(1));
        let steps = steps.div_ceil(self.splits);
        let epilogue = EPILOGUE + self.tile.rows * self.tile.cols / STORED_PER_CYCLE;
        // Partial sums are written and read once.
        let combine = LAUNCH + 2 * 4 * self.splits * m * n / (sms * MEMORY_PER_CYCLE);
        let tiles = waves * (steps * self.tile.step_cycles(promotion) + epilogue);
        if self.splits > 1 { tiles + combine } else { tiles }
    }
}

/// Tiles whose sums and scales fit in registers.
fn tiles(promotion: Promotion) -> impl Iterator<Item = Tile> {
    TILES.into_iter().filter(move |tile| tile.registers(promotion) <= MAX_REGISTERS)
}

/// Two blocks share B where there are two and at most one in eight multiplies rows that do not exist.
fn cluster(tile: Tile, m: usize) -> usize {
    let tiles = m.div_ceil(tile.rows);
    if tiles.is_multiple_of(2) || tiles > 7 { 2 } else { 1 }
}

#[cfg(test)]
mod tests {
    use super::*;

    const H200: usize = 132;

    fn plan([m, n, k]: [usize; 3]) -> Plan {
        Plan::new([m, n], k.div_ceil(ROW_BYTES), H200, Promotion::EachStep)
    }

    #[test]
    fn large_gemms_take_the_largest_tile_in_clusters() {
        for shape in [[4096; 3], [8192; 3], [16384; 3], [8192, 14336, 4096]] {
            assert_eq!(plan(shape), Plan { tile: TILES[0], cluster: 2, splits: 1 }, "{shape:?}");
        }
    }

    #[test]
    fn few_rows_take_low_tiles() {
        let plan = plan([16, 4096, 4096]);
        assert_eq!((plan.tile.rows, plan.cluster), (64, 1), "{plan:?}");
    }

    #[test]
    fn few_columns_take_narrow_tiles() {
        assert_eq!(plan([16384, 48, 1024]).tile, Tile { rows: 128, cols: 64 });
    }

    #[test]
    fn small_outputs_of_long_contractions_are_split() {
        let plan = plan([256, 256, 65536]);
        assert!(plan.splits >= 8, "{plan:?}");
        assert_eq!(self::plan([256, 256, 256]).splits, 1);
    }

    #[test]
    fn every_item_has_work() {
        for m in [1, 63, 64, 65, 129, 1000, 4096] {
            for n in [1, 64, 100, 257, 5000] {
                for k in [1, 128, 500, 4096, 100_000] {
                    let plan = plan([m, n, k]);
                    assert!(plan.splits <= k.div_ceil(ROW_BYTES), "{plan:?}");
                    assert!(plan.padded_rows(m) >= m && plan.padded_rows(m) - m < plan.tile.rows * plan.cluster);
                }
            }
        }
    }

    #[test]
    fn sums_and_scales_fit_in_registers() {
        for promotion in [Promotion::Never, Promotion::EachStep, Promotion::EachStepScaled] {
            assert_eq!(tiles(promotion).count(), TILES.len());
        }
        let by_column: Vec<_> = tiles(Promotion::EachStepByColumn).collect();
        assert_eq!(by_column, TILES[1..]);
        for tile in TILES {
            assert_eq!(CONSUMERS * tile.group_cols() * MMA_ROWS, tile.rows * tile.cols);
        }
    }
}
