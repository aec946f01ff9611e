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

use super::fixed::FixedPlan;
use crate::gemm::grouped::Grouping;
use crate::view::MAX_INDEX;

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

/// Rows and columns of the output that a block makes at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(in crate::gemm) struct Tile {
    pub(in crate::gemm) rows: usize,
    pub(in crate::gemm) cols: usize,
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

/// How a GEMM is cut up.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(in crate::gemm) struct Plan {
    pub(in crate::gemm) tile: Tile,
    /// Blocks along M that share the tiles of B.
    pub(in crate::gemm) cluster: usize,
    /// Splits of the contraction (split-K), which are summed apart.
    pub(in crate::gemm) splits: usize,
}

impl Plan {
    /// The plan of least cycles for an output `[m, n]` and `steps` of the contraction on `sms` SMs; of equal ones
    /// the tile and the cluster that come first and the fewer splits.
    pub(in crate::gemm) fn new<M: Machine>(machine: &M, [m, n]: [usize; 2], steps: usize, sms: usize) -> Self {
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
    pub(in crate::gemm) fn grouped<M: Machine>(
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

    /// Rows of the output with those of all tiles.
    pub(in crate::gemm) fn padded_rows(&self, m: usize) -> usize {
        self.row_clusters(m) * self.height()
    }

    /// Clusters' shares of the work.
    pub(in crate::gemm) fn items(&self, m: usize, n: usize) -> usize {
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
