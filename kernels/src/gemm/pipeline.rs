//! What the GEMMs that TMA feeds keep count of: their tiles, and the stages of their pipelines.

use core::sync::atomic::{AtomicBool, Ordering};

use cubecl::prelude::*;

use super::grouped::Work;
use super::problem::Problem;
use crate::grid::banded_tile;

/// Whether waits for barriers end.
static TRAP: AtomicBool = AtomicBool::new(cfg!(debug_assertions));

/// Whether kernels that are compiled from now on end with an error that names them when a barrier is not complete after ten
/// seconds, instead of hanging: in debug builds they do. They are slower: the assertion is a function, and a call serializes `wgmma`. CUDA prints
/// the assertion `an mbarrier is complete within ten seconds` when the process next waits for the device, which cannot be used
/// by this process any longer.
pub fn trap_stuck_barriers(trap: bool) {
    TRAP.store(trap, Ordering::Relaxed);
}

/// What [`mbarrier_wait`](crate::ptx::barrier::mbarrier_wait) is to trap for.
pub(super) fn trap(kernel: &'static str) -> Option<&'static str> {
    TRAP.load(Ordering::Relaxed).then_some(kernel)
}

/// A tile of the output, and the steps of the contraction to sum.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Item {
    pub(super) work: Work,
    pub(super) step_begin: u32,
    pub(super) step_end: u32,
    /// Rows above those of the output where the sums go: partial sums of a part of the contraction follow those of the part before,
    /// all rows of tiles included.
    pub(super) above: u32,
}

/// How the work is divided.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(super) struct Extent {
    /// Stages' shares of the contraction.
    pub(super) steps: u32,
    /// Tiles along the rows that a cluster makes together.
    pub(super) row_clusters: u32,
    /// Tiles along the columns.
    pub(super) col_tiles: u32,
    /// Parts of the contraction that are summed apart.
    pub(super) splits: u32,
}

#[cube]
impl Extent {
    /// Items of work, for a cluster each.
    pub(super) fn items(&self) -> u32 {
        self.row_clusters * self.col_tiles * self.splits
    }
}

/// What the kernel makes of an item.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct ItemShape {
    /// Rows and columns of a block's tile.
    pub(super) tile: [u32; 2],
    /// Blocks of a cluster, whose tiles are above each other.
    pub(super) cluster: u32,
    /// Length of the contraction in a stage.
    pub(super) step: u32,
    /// What the first row of B of a tile is a multiple of, where matrices of B follow each other.
    pub(super) align: u32,
}

/// Where the stages of a block, and the chunks in which it stores its output, lie in shared memory: all stages of A, all of B, the
/// chunks, all stages of scales.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Layout {
    pub(super) stages: usize,
    /// Bytes of a stage of A, of B and of scales.
    pub(super) stage_a: usize,
    pub(super) stage_b: usize,
    pub(super) stage_scales: usize,
    /// Bytes of all chunks.
    pub(super) chunks: usize,
}

/// Most stages of the pipeline; more would only lengthen its start.
const MAX_STAGES: usize = 8;

impl Layout {
    pub(super) const fn tiles_b_at(&self) -> usize {
        self.stages * self.stage_a
    }

    pub(super) const fn chunks_at(&self) -> usize {
        self.tiles_b_at() + self.stages * self.stage_b
    }

    pub(super) const fn scales_at(&self) -> usize {
        self.chunks_at() + self.chunks
    }

    pub(super) const fn end(&self) -> usize {
        self.scales_at() + self.stages * self.stage_scales
    }

    /// As many stages as leave `max_shared` bytes enough, if with so many the block takes `shared` bytes.
    pub(super) fn most_stages(max_shared: usize, shared: impl Fn(usize) -> usize) -> usize {
        (1..=MAX_STAGES).take_while(|stages| shared(*stages) <= max_shared).last().expect("a stage fits")
    }
}

/// Addresses of A and of B in a stage.
#[cube]
pub(super) fn stage_operands(base: u32, stage: u32, #[comptime] layout: Layout) -> (u32, u32) {
    let a = base + stage * comptime!(layout.stage_a as u32);
    let b = base + comptime!(layout.tiles_b_at() as u32) + stage * comptime!(layout.stage_b as u32);
    (a, b)
}

/// Address of a stage's scales.
#[cube]
pub(super) fn stage_scales(base: u32, stage: u32, #[comptime] layout: Layout) -> u32 {
    base + comptime!(layout.scales_at() as u32) + stage * comptime!(layout.stage_scales as u32)
}

/// Item `index`, for the block of this rank in its cluster: bands of rows, column by column; of groups, one after the other.
#[cube]
pub(super) fn item(index: u32, problem: &Problem, extent: &Extent, #[comptime] shape: ItemShape) -> Item {
    let ItemShape { tile, cluster, step, align } = comptime!(shape);
    if comptime!(problem.grouping.is_some()) {
        let work = problem.group_work(index, extent.col_tiles, tile, align);
        Item { work, step_begin: work.first / step, step_end: work.end.div_ceil(step), above: 0u32.runtime() }
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

/// Which of some stages, or of some buffers, comes next, and the parity of its phase.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Place {
    pub(super) at: u32,
    pub(super) parity: u32,
}

/// The first, in its phase of this parity.
#[cube]
pub(super) fn first_place(#[comptime] parity: u32) -> Place {
    Place { at: 0u32.runtime(), parity: parity.runtime() }
}

/// The next of `count`.
#[cube]
pub(super) fn advance(place: &mut Place, #[comptime] count: u32) {
    place.at += 1;
    if place.at == count {
        place.at = 0u32;
        place.parity ^= 1u32;
    }
}
