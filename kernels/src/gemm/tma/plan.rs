//! Tile, cluster and split of a GEMM. The choice minimizes an estimate of cycles from the shape and
//! the costs of a [`Machine`].
//!
//! ```text
//! epilogue = 600 + rows · cols / 32
//! item     = steps · step + epilogue                               cycles of a tile, or of its share of the contraction
//! total    = ceil(items / blocks that run at once) · item + (splits > 1) · combine
//! ```
//!
//! If a tile's epilogue overlaps the next tile's products, an item takes
//! `max(steps · step, epilogue)`, and the last epilogue is added to the total. The costs of an
//! epilogue and a launch are assumptions: stores by TMA, and of 16 bytes a thread at the end of a
//! group. Outputs whose row stride is not a multiple of 16 bytes are stored by elements. That takes
//! several times as long for any tile and is not counted.
//!
//! **Groups.** Their sizes are on the device. The host knows only their number G and the total of
//! `M` rows. Tiles are aligned over all rows together, so a group of `r` rows starts and ends
//! inside tiles. A tile of two groups is computed twice. A cluster's tile, of height
//! `h = rows · blocks`, belongs to one group, so that its blocks share B. The estimate counts
//!
//! ```text
//! rows of A:        ceil(M / h) + G     tiles of height h along M: a whole one more for each group's end
//! contraction:      ceil(M / h) · G     a matrix of M rows for each group, steps / G
//! ```
//!
//! The first is the maximum. On average a group of `r` rows that starts anywhere has rows in
//! `1 + (r - 1) / h` tiles. In tiles of one block, that is about `r / rows + 1` for single blocks
//! and `r / rows + 2` for clusters of two. A cluster must save more than this extra tile costs.

use std::sync::{Mutex, PoisonError};

use crate::gemm::grouped::{Grouping, Groups};
use crate::granularity::BLOCK;
use crate::view::MAX_INDEX;
use crate::{Granularity, Operand};

/// Cycles of an epilogue without its stores.
const EPILOGUE: usize = 600;

/// Elements of the output that a block stores per cycle.
const STORED_PER_CYCLE: usize = 32;

/// Cycles of a second launch that waits for the first.
const LAUNCH: usize = 4000;

/// Minimum steps of a split.
const MIN_STEPS: usize = 4;

/// Possible numbers of splits.
const SPLITS: [usize; 5] = [1, 2, 4, 8, 16];

/// Properties of a GEMM that determine its plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct GemmShape {
    /// Rows and columns of one output matrix, and the contraction length over all groups.
    pub product: [usize; 3],
    /// Granularities of the operands.
    pub granularities: [Granularity; 2],
    /// Whether all scales are powers of two
    /// ([`Operand::power_of_two`](crate::Operand::power_of_two)).
    pub power_of_two: bool,
    /// Whether the tensor cores' accumulators may sum the whole contraction.
    pub use_fast_accum: bool,
    /// Axis that groups divide, and their number.
    pub groups: Option<(Grouping, usize)>,
}

impl GemmShape {
    /// Shape of a product of these operands.
    pub fn of([a, b]: [&Operand; 2], groups: Option<&Groups>, use_fast_accum: bool) -> Self {
        let (m, n, _) = Groups::matrices(groups, [a, b]);
        Self {
            product: [m, n, a.k],
            granularities: [a.granularity, b.granularity],
            power_of_two: a.power_of_two && b.power_of_two,
            use_fast_accum,
            groups: groups.map(|groups| (groups.grouping, groups.count)),
        }
    }

    /// Tiles of `height` rows along M, over all output matrices.
    pub(crate) fn row_tiles(&self, height: usize) -> usize {
        let [m, ..] = self.product;
        self.groups.map_or(m.div_ceil(height), |(grouping, count)| grouping.row_tiles(count, m, height))
    }

    /// Tiles of `height` by `width`, over all output matrices.
    pub(in crate::gemm) fn tiles(&self, [height, width]: [u32; 2]) -> u32 {
        let [_, n, _] = self.product;
        self.row_tiles(height as usize) as u32 * (n as u32).div_ceil(width)
    }

    /// How the groups divide the GEMM, if there are groups.
    pub(crate) fn grouping(&self) -> Option<Grouping> {
        self.groups.map(|(grouping, _)| grouping)
    }

    /// Whether scales change along the contraction.
    pub(in crate::gemm) const fn by_block(&self) -> bool {
        Granularity::any_blocks(self.granularities)
    }

    /// Whether the columns of an aligned tile, up to 128, may have different f32 scales of B.
    pub(in crate::gemm) const fn scales_b_differ(&self) -> bool {
        // Then a 128x128 block contains the last rows of one group's matrix and the first rows of
        // the next.
        let shifted = matches!(self.groups, Some((Grouping::Rows, _))) && !self.product[1].is_multiple_of(BLOCK);
        match self.granularities[1] {
            Granularity::Row | Granularity::Block1x128 => true,
            Granularity::Block128x128 => shifted,
            Granularity::Tensor | Granularity::Block1x32 => false,
        }
    }
}

/// Rows and columns of the output that a block makes at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct GemmTile {
    /// Rows.
    pub rows: usize,
    /// Columns.
    pub cols: usize,
}

/// Tile, cluster and stages for all TMA GEMMs, without split-K.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FixedPlan {
    /// Rows of the output that a block makes at a time.
    pub rows: usize,
    /// Columns of the output that a block makes at a time.
    pub cols: usize,
    /// Blocks along M that share the tiles of B: 1 or 2.
    pub cluster: usize,
    /// Pipeline stages, or fewer if these do not fit.
    pub stages: usize,
}

static FIXED: Mutex<Option<FixedPlan>> = Mutex::new(None);

/// Overrides the estimated plan of TMA GEMMs on all devices of the process, if their kernel has
/// this tile. Used to benchmark the estimate. `None` restores it.
pub fn fix_gemm_plan(plan: Option<FixedPlan>) {
    *FIXED.lock().unwrap_or_else(PoisonError::into_inner) = plan;
}

pub(in crate::gemm) fn fixed_plan() -> Option<FixedPlan> {
    *FIXED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Costs and limits of a kernel on its device.
pub(in crate::gemm) trait Machine {
    /// Bytes of device memory per cycle and SM.
    const MEMORY_PER_CYCLE: usize;

    /// Tiles that a block can make, the fastest per element first.
    fn tiles(&self) -> impl Iterator<Item = GemmTile>;

    /// Possible numbers of blocks along M that share the tiles of B, for an output of `m` rows. The
    /// best comes first.
    fn clusters(&self, tile: GemmTile, m: usize) -> &'static [usize];

    /// Possible numbers of blocks that share B, for groups of `rows` rows on average that start
    /// anywhere in a tile.
    fn group_clusters(&self, tile: GemmTile, rows: usize) -> &'static [usize] {
        self.clusters(tile, rows)
    }

    /// Cycles of a step of the contraction in a cluster of `cluster` blocks.
    fn step_cycles(&self, tile: GemmTile, cluster: usize) -> usize;

    /// Whether a tile's epilogue overlaps the next tile's products.
    fn overlaps_epilogue(&self) -> bool;
}

/// Division of a TMA GEMM among blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct GemmPlan {
    /// Output tile of a block.
    pub tile: GemmTile,
    /// Blocks along M that share the tiles of B.
    pub cluster: usize,
    /// Splits of the contraction (split-K), which are summed separately.
    pub splits: usize,
}

impl GemmPlan {
    /// Plan with tiles of this size, for paths without TMA.
    pub(in crate::gemm) const fn of_tile([rows, cols]: [u32; 2]) -> Self {
        Self { tile: GemmTile { rows: rows as usize, cols: cols as usize }, cluster: 1, splits: 1 }
    }

    /// Rows and columns of a tile.
    pub(in crate::gemm) const fn size(&self) -> [u32; 2] {
        [self.tile.rows as u32, self.tile.cols as u32]
    }

    /// Fastest plan for a kernel that sums `step` of the contraction per stage.
    pub(in crate::gemm) fn of<M: Machine>(machine: &M, shape: &GemmShape, step: usize, sms: usize) -> Self {
        let [m, n, k] = shape.product;
        let steps = k.div_ceil(step);
        match shape.groups {
            Some((grouping, count)) => Self::grouped(machine, grouping, count, [m, n], steps, sms),
            None => Self::new(machine, [m, n], steps, sms),
        }
    }

    /// Plan with the fewest cycles for an output `[m, n]` and `steps` of the contraction on `sms`
    /// SMs. Of equal ones, the first tile and cluster and the fewest splits.
    fn new<M: Machine>(machine: &M, [m, n]: [usize; 2], steps: usize, sms: usize) -> Self {
        let shapes = |tile| machine.clusters(tile, m).iter().map(move |&cluster| (tile, cluster));
        let plans = |(tile, cluster)| SPLITS.map(|splits| GemmPlan { tile, cluster, splits });
        let possible = machine
            .tiles()
            .flat_map(shapes)
            .flat_map(plans)
            .filter(|plan| plan.splits == 1 || plan.may_split([m, n], steps));
        possible.min_by_key(|plan| plan.cycles(machine, [m, n], steps, sms)).expect("one split is possible")
    }

    /// Fastest plan for `count` groups with matrices of `m` rows and `n` columns, by the module's
    /// formulas. No splits, because each group has either a part of the contraction or all of it.
    fn grouped<M: Machine>(
        machine: &M,
        grouping: Grouping,
        count: usize,
        [m, n]: [usize; 2],
        steps: usize,
        sms: usize,
    ) -> Self {
        let steps = match grouping {
            Grouping::Rows => steps,
            Grouping::Contraction => steps.div_ceil(count),
        };
        let clusters = |tile| match grouping {
            Grouping::Rows => machine.group_clusters(tile, m.div_ceil(count)),
            Grouping::Contraction => machine.clusters(tile, m),
        };
        let plans = |tile| clusters(tile).iter().map(move |&cluster| GemmPlan { tile, cluster, splits: 1 });
        let rows = |height: usize| grouping.row_tiles(count, m, height) * height;
        machine
            .tiles()
            .flat_map(plans)
            .min_by_key(|plan| plan.cycles(machine, [rows(plan.height()), n], steps, sms))
            .expect("a tile")
    }

    /// The fixed plan, if the kernel has its tile and cluster.
    pub(in crate::gemm) fn fixed<M: Machine>(machine: &M, fixed: FixedPlan) -> Option<Self> {
        let FixedPlan { rows, cols, cluster, .. } = fixed;
        let tile = machine.tiles().find(|tile| *tile == GemmTile { rows, cols })?;
        // For many rows, the possible cluster sizes of a tile do not depend on their number.
        let is_possible = cluster == 1 || machine.clusters(tile, usize::MAX / 2).contains(&cluster);
        is_possible.then_some(Self { tile, cluster, splits: 1 })
    }

    /// Rows of a cluster's tile.
    pub(in crate::gemm) const fn height(&self) -> usize {
        self.tile.rows * self.cluster
    }

    /// Cluster tiles along the rows.
    pub(in crate::gemm) fn row_clusters(&self, m: usize) -> usize {
        m.div_ceil(self.height())
    }

    /// Rows of an output of `m` rows, including the padding rows of tiles.
    pub fn padded_rows(&self, m: usize) -> usize {
        self.row_clusters(m) * self.height()
    }

    /// Tiles of clusters in an output of `m` rows and `n` columns, once for each split.
    pub fn items(&self, m: usize, n: usize) -> usize {
        self.row_clusters(m) * n.div_ceil(self.tile.cols) * self.splits
    }

    fn may_split(&self, [m, n]: [usize; 2], steps: usize) -> bool {
        let partials = (self.splits * self.padded_rows(m)) as u64 * n.next_multiple_of(4) as u64;
        steps >= self.splits * MIN_STEPS && partials <= MAX_INDEX
    }

    fn cycles<M: Machine>(&self, machine: &M, [m, n]: [usize; 2], steps: usize, sms: usize) -> usize {
        let waves = self.items(m, n).div_ceil((sms / self.cluster).max(1));
        let steps = steps.div_ceil(self.splits) * machine.step_cycles(self.tile, self.cluster);
        let epilogue = EPILOGUE + self.tile.rows * self.tile.cols / STORED_PER_CYCLE;
        // Partial sums are written once and read once.
        let combine = LAUNCH + 2 * 4 * self.splits * m * n / (sms * M::MEMORY_PER_CYCLE);
        let tiles = if machine.overlaps_epilogue() {
            waves * steps.max(epilogue) + epilogue
        } else {
            waves * (steps + epilogue)
        };
        if self.splits > 1 { tiles + combine } else { tiles }
    }
}
