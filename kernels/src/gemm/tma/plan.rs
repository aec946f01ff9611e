//! Tile, cluster and split of a GEMM by an estimate of its cycles from the shape alone, given what a [`Machine`] takes.
//!
//! ```text
//! epilogue = 600 + rows · cols / 32
//! item     = steps · step + epilogue                               cycles of a tile, or of its share of the contraction
//! total    = ceil(items / blocks that run at once) · item + (splits > 1) · combine
//! ```
//!
//! Where the epilogue of a tile runs beside the products of the next, an item takes `max(steps · step, epilogue)`, and the last one's
//! epilogue is added to the total. What an epilogue and a launch cost is assumed: that of stores by TMA, and of 16 bytes a thread where a
//! group ends. Outputs whose rows are no multiple of 16 bytes apart are stored by elements, which takes several times as long, whatever
//! the tile; it is not counted.
//!
//! **Groups.** Their sizes are on the device; the host knows their number G and the `M` rows of all. Tiles are aligned in all rows
//! together, so that a group of `r` rows begins and ends inside tiles, and a tile of two groups is made twice. A cluster's tile, of
//! height `h = rows · blocks`, is one group's, so that its blocks share B. Counted are
//!
//! ```text
//! rows of A:        ceil(M / h) + G     tiles of height h along M: a whole one more for each group's end
//! contraction:      ceil(M / h) · G     a matrix of M rows for each group, steps / G
//! ```
//!
//! The first is the most that there can be. On average a group of `r` rows, which may begin at any row, has rows in `1 + (r - 1) / h`
//! tiles. Counted in tiles of one block, that is about `r / rows + 1` for blocks alone and `r / rows + 2` for clusters of two: the
//! extra tile is what a cluster's saving has to pay for.

use std::sync::{Mutex, PoisonError};

use crate::gemm::grouped::{Grouping, Groups};
use crate::granularity::BLOCK;
use crate::view::MAX_INDEX;
use crate::{Granularity, Operand};

/// Cycles of an epilogue but for its stores.
const EPILOGUE: usize = 600;

/// Elements of the output that a block stores per cycle.
const STORED_PER_CYCLE: usize = 32;

/// Cycles of a second launch that waits for the first.
const LAUNCH: usize = 4000;

/// Fewest steps that are worth a split of their own.
const MIN_STEPS: usize = 4;

/// Numbers of splits to choose from.
const SPLITS: [usize; 5] = [1, 2, 4, 8, 16];

/// What of a GEMM its plan depends on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct GemmShape {
    /// Rows and columns of one matrix of the output, and the length of the contraction, of all groups.
    pub product: [usize; 3],
    /// What shares one scale in either operand.
    pub granularities: [Granularity; 2],
    /// Whether all scales are powers of two ([`Operand::power_of_two`](crate::Operand::power_of_two)).
    pub power_of_two: bool,
    /// Whether the tensor cores' own accumulators may sum all of the contraction.
    pub use_fast_accum: bool,
    /// What groups divide, and how many there are.
    pub groups: Option<(Grouping, usize)>,
}

impl GemmShape {
    /// The shape of a product of these operands.
    pub fn of([a, b]: [&Operand; 2], groups: Option<&Groups>, use_fast_accum: bool) -> Self {
        let (m, n, _) = groups.map_or((a.rows, b.rows, 1), |groups| groups.matrices(a.rows, b.rows));
        Self {
            product: [m, n, a.k],
            granularities: [a.granularity, b.granularity],
            power_of_two: a.power_of_two && b.power_of_two,
            use_fast_accum,
            groups: groups.map(|groups| (groups.grouping, groups.count)),
        }
    }

    /// Tiles of `height` rows along M, of all matrices of the output.
    pub(in crate::gemm) fn row_tiles(&self, height: usize) -> usize {
        let [m, ..] = self.product;
        self.groups.map_or(m.div_ceil(height), |(grouping, count)| grouping.row_tiles(count, m, height))
    }

    /// Tiles of `height` by `width`, of all matrices of the output.
    pub(in crate::gemm) fn tiles(&self, [height, width]: [u32; 2]) -> u32 {
        let [_, n, _] = self.product;
        self.row_tiles(height as usize) as u32 * (n as u32).div_ceil(width)
    }

    /// Whether scales change along the contraction.
    pub(in crate::gemm) const fn by_block(&self) -> bool {
        Granularity::any_blocks(self.granularities)
    }

    /// Whether columns of an aligned tile, of 128 at most, may have different f32 scales of B.
    pub(in crate::gemm) const fn scales_b_differ(&self) -> bool {
        // Then a square of scales has the last rows of one group's matrix and the first of the next one's.
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
pub struct Tile {
    /// Rows.
    pub rows: usize,
    /// Columns.
    pub cols: usize,
}

/// Tile, cluster and stages of all GEMMs that TMA feeds, without split-K.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FixedPlan {
    /// Rows of the output that a block makes at a time.
    pub rows: usize,
    /// Columns of the output that a block makes at a time.
    pub cols: usize,
    /// Blocks along M that share the tiles of B: 1 or 2.
    pub cluster: usize,
    /// Stages of the pipeline, if as many fit.
    pub stages: usize,
}

static FIXED: Mutex<Option<FixedPlan>> = Mutex::new(None);

/// From here on GEMMs that TMA feeds, on all devices of the process, take this plan where their kernel has its tile, instead of the one
/// that an estimate chooses: to measure whether the estimate is right. `None` goes back to the estimate.
pub fn fix_gemm_plan(plan: Option<FixedPlan>) {
    *FIXED.lock().unwrap_or_else(PoisonError::into_inner) = plan;
}

pub(in crate::gemm) fn fixed_plan() -> Option<FixedPlan> {
    *FIXED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What the estimate asks of a kernel and the device that it is for.
pub(in crate::gemm) trait Machine {
    /// Bytes of device memory per cycle and SM.
    const MEMORY_PER_CYCLE: usize;

    /// Tiles that a block can make, the fastest per element first.
    fn tiles(&self) -> impl Iterator<Item = Tile>;

    /// Blocks along M that may share the tiles of B, for an output of `m` rows; the best number first.
    fn clusters(&self, tile: Tile, m: usize) -> &'static [usize];

    /// How many blocks may share B, for groups of so many rows on average, which begin anywhere in a tile.
    fn group_clusters(&self, tile: Tile, rows: usize) -> &'static [usize] {
        self.clusters(tile, rows)
    }

    /// Cycles of a step of the contraction, in a cluster of so many blocks.
    fn step_cycles(&self, tile: Tile, cluster: usize) -> usize;

    /// Whether a tile's epilogue runs beside the products of the next.
    fn overlaps_epilogue(&self) -> bool;
}

/// How a GEMM that TMA feeds is cut up.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Plan {
    /// A block's part of the output.
    pub tile: Tile,
    /// Blocks along M that share the tiles of B.
    pub cluster: usize,
    /// Splits of the contraction (split-K), which are summed apart.
    pub splits: usize,
}

impl Plan {
    /// Tiles of this size on paths that TMA does not feed.
    pub(in crate::gemm) const fn of_tile([rows, cols]: [u32; 2]) -> Self {
        Self { tile: Tile { rows: rows as usize, cols: cols as usize }, cluster: 1, splits: 1 }
    }

    /// Rows and columns of a tile.
    pub(in crate::gemm) const fn size(&self) -> [u32; 2] {
        [self.tile.rows as u32, self.tile.cols as u32]
    }

    /// The fastest plan for a kernel that sums `step` of the contraction a stage.
    pub(in crate::gemm) fn of<M: Machine>(machine: &M, shape: &GemmShape, step: usize, sms: usize) -> Self {
        let [m, n, k] = shape.product;
        let steps = k.div_ceil(step);
        match shape.groups {
            Some((grouping, count)) => Self::grouped(machine, grouping, count, [m, n], steps, sms),
            None => Self::new(machine, [m, n], steps, sms),
        }
    }

    /// The plan of least cycles for an output `[m, n]` and `steps` of the contraction on `sms` SMs; of equal ones
    /// the tile and the cluster that come first and the fewer splits.
    fn new<M: Machine>(machine: &M, [m, n]: [usize; 2], steps: usize, sms: usize) -> Self {
        let shapes = |tile| machine.clusters(tile, m).iter().map(move |&cluster| (tile, cluster));
        let plans = |(tile, cluster)| SPLITS.map(|splits| Plan { tile, cluster, splits });
        let possible = machine
            .tiles()
            .flat_map(shapes)
            .flat_map(plans)
            .filter(|plan| plan.splits == 1 || plan.may_split([m, n], steps));
        possible.min_by_key(|plan| plan.cycles(machine, [m, n], steps, sms)).expect("one split is possible")
    }

    /// The fastest plan for `count` groups of matrices of so many rows and columns, by the formulas of the module. Groups have a part of the
    /// contraction each or all of it, so there are no splits.
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
        let plans = |tile| clusters(tile).iter().map(move |&cluster| Plan { tile, cluster, splits: 1 });
        let rows = |height: usize| grouping.row_tiles(count, m, height) * height;
        machine
            .tiles()
            .flat_map(plans)
            .min_by_key(|plan| plan.cycles(machine, [rows(plan.height()), n], steps, sms))
            .expect("a tile")
    }

    /// The plan that is asked for, if there is such a tile.
    pub(in crate::gemm) fn fixed<M: Machine>(machine: &M, fixed: FixedPlan) -> Option<Self> {
        let FixedPlan { rows, cols, cluster, .. } = fixed;
        let tile = machine.tiles().find(|tile| *tile == Tile { rows, cols })?;
        // Whether clusters have such a tile, and how many blocks, does not depend on rows that are many.
        let is_possible = cluster == 1 || machine.clusters(tile, usize::MAX / 2).contains(&cluster);
        is_possible.then_some(Self { tile, cluster, splits: 1 })
    }

    /// Rows of a cluster's tile.
    pub(in crate::gemm) const fn height(&self) -> usize {
        self.tile.rows * self.cluster
    }

    /// Clusters' tiles along the rows.
    pub(in crate::gemm) fn row_clusters(&self, m: usize) -> usize {
        m.div_ceil(self.height())
    }

    /// Rows of an output of `m` rows with those of all tiles.
    pub fn padded_rows(&self, m: usize) -> usize {
        self.row_clusters(m) * self.height()
    }

    /// Clusters' shares of the work, for an output of `m` rows and `n` columns.
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
        // Partial sums are written and read once.
        let combine = LAUNCH + 2 * 4 * self.splits * m * n / (sms * M::MEMORY_PER_CYCLE);
        let tiles = if machine.overlaps_epilogue() {
            waves * steps.max(epilogue) + epilogue
        } else {
            waves * (steps + epilogue)
        };
        if self.splits > 1 { tiles + combine } else { tiles }
    }
}
