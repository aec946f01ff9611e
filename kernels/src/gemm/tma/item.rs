//! Work items of a block or a cluster: an output tile and a split of the contraction.

use cubecl::prelude::*;

use crate::gemm::problem::Problem;
use crate::gemm::schedule::{GroupCursor, Work};
use crate::grid::banded_tile;
use crate::ptx::barrier::cluster_sync;

/// Output tile, and the steps of the contraction to sum.
#[derive(CubeType, Clone, Copy)]
pub(in crate::gemm) struct Item {
    pub(in crate::gemm) work: Work,
    pub(in crate::gemm) step_begin: u32,
    pub(in crate::gemm) step_end: u32,
    /// First row of this split's sums in the split-K workspace. The splits follow each other there,
    /// including padding rows of tiles. 0 without split-K.
    pub(in crate::gemm) above: u32,
}

/// Division of the work.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(in crate::gemm) struct Extent {
    /// Steps of the contraction, one stage each.
    pub(in crate::gemm) steps: u32,
    /// Cluster tiles along the rows.
    pub(in crate::gemm) row_clusters: u32,
    /// Tiles along the columns.
    pub(in crate::gemm) col_tiles: u32,
    /// Splits of the contraction, which are summed separately.
    pub(in crate::gemm) splits: u32,
}

#[cube]
impl Extent {
    /// Work items, one per cluster.
    pub(in crate::gemm) fn items(&self) -> u32 {
        self.row_clusters * self.col_tiles * self.splits
    }
}

/// Synchronizes all threads that make a tile: the threads of the block, or of its cluster.
#[cube]
pub(in crate::gemm) fn sync_blocks(#[comptime] cluster: u32) {
    if comptime!(cluster > 1) {
        cluster_sync();
    } else {
        sync_cube();
    }
}

/// First item of this block's cluster.
#[cube]
pub(in crate::gemm) fn first_item(#[comptime] cluster: u32) -> u32 {
    CUBE_POS_X / cluster
}

/// Distance from one item of a cluster to its next.
#[cube]
pub(in crate::gemm) fn items_at_once(#[comptime] cluster: u32) -> u32 {
    CUBE_COUNT_X / cluster
}

/// Shape of an item.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(in crate::gemm) struct ItemShape {
    /// Rows and columns of a block's tile.
    pub(in crate::gemm) tile: [u32; 2],
    /// Blocks of a cluster, whose tiles follow each other along M.
    pub(in crate::gemm) cluster: u32,
    /// Contraction length of a stage.
    pub(in crate::gemm) step: u32,
    /// Alignment of a tile's first row of B where the matrices of B are stacked.
    pub(in crate::gemm) align: u32,
}

/// Item `index`, for the block of this rank in its cluster. Items follow bands of rows, column by
/// column; groups come one after the other.
///
/// At the end of a group a block of the cluster may have no rows to store. It still runs all steps,
/// because the other block needs the share of B that it loads.
#[cube]
pub(in crate::gemm) fn item(
    index: u32,
    problem: &Problem,
    extent: &Extent,
    cursor: &mut GroupCursor,
    #[comptime] shape: ItemShape,
) -> Item {
    let ItemShape { tile, cluster, step, align } = comptime!(shape);
    if comptime!(problem.grouping.is_some()) {
        let [height, width] = comptime!(tile);
        // A cluster's tile belongs to one group, so that its blocks have the same B and the same
        // steps.
        let mut work = problem.group_work(index, extent.col_tiles, cursor, comptime!([cluster * height, width]), align);
        if comptime!(cluster > 1) {
            // If the tile does not exist, its rows are past the end, where nothing is stored.
            // `MAX_INDEX` prevents wrap-around.
            work.row0 += CUBE_POS_X % cluster * height;
        }
        Item { work, step_begin: work.k_begin / step, step_end: work.k_end.div_ceil(step), above: 0u32.runtime() }
    } else {
        let [height, width] = comptime!(tile);
        let tiles = extent.row_clusters * extent.col_tiles;
        let split = index / tiles;
        let (row_cluster, col) = banded_tile(index % tiles, extent.row_clusters, extent.col_tiles);
        let row = row_cluster * cluster + CUBE_POS_X % cluster;
        Item {
            work: problem.whole_work(row * height, col * width),
            step_begin: extent.steps * split / extent.splits,
            step_end: extent.steps * (split + 1) / extent.splits,
            above: split * extent.row_clusters * comptime!(cluster * tile[0]),
        }
    }
}
