//! Ring of shared memory stages that TMA fills and the tensor cores read: their layout and
//! mbarriers.

use cubecl::prelude::*;

use super::plan::fixed_plan;
use crate::ptx::barrier::{mbarrier_arrive, mbarrier_arrive_remote, mbarrier_init, mbarrier_wait};

/// Layout of a block's stages and output chunks in shared memory: all stages of A, all of B, the
/// chunks, all stages of scales.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(in crate::gemm) struct Layout {
    pub(in crate::gemm) stages: usize,
    /// Bytes of a stage of A, of B and of scales.
    pub(in crate::gemm) stage_a: usize,
    pub(in crate::gemm) stage_b: usize,
    pub(in crate::gemm) stage_scales: usize,
    /// Bytes of all chunks.
    pub(in crate::gemm) chunks: usize,
}

/// Maximum stages of the pipeline. More would only lengthen its start.
pub(in crate::gemm) const MAX_STAGES: usize = 8;

impl Layout {
    pub(in crate::gemm) const fn tiles_b_at(&self) -> usize {
        self.stages * self.stage_a
    }

    pub(in crate::gemm) const fn chunks_at(&self) -> usize {
        self.tiles_b_at() + self.stages * self.stage_b
    }

    pub(in crate::gemm) const fn scales_at(&self) -> usize {
        self.chunks_at() + self.chunks
    }

    pub(in crate::gemm) const fn end(&self) -> usize {
        self.scales_at() + self.stages * self.stage_scales
    }

    /// Maximum number of stages that fit in `max_shared`. `shared(n)` is the block's shared memory
    /// for `n` stages, in bytes.
    pub(in crate::gemm) fn most_stages(max_shared: usize, shared: impl Fn(usize) -> usize) -> usize {
        let most = fixed_plan().map_or(MAX_STAGES, |fixed| fixed.stages.clamp(1, MAX_STAGES));
        (1..=most).take_while(|stages| shared(*stages) <= max_shared).last().expect("a stage fits")
    }
}

/// Address of the stages in shared memory, and their mbarriers.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct Ring {
    pub(crate) base: u32,
    /// Address of the first mbarrier of full stages.
    full: u32,
    /// Address of the first mbarrier of empty stages.
    pub(in crate::gemm) empty: u32,
}

#[cube]
impl Ring {
    /// Ring whose stages start at `base`. Its mbarriers start `barriers_at` bytes after: full
    /// stages, then empty stages.
    pub(crate) fn new(base: u32, #[comptime] barriers_at: usize, #[comptime] stages: usize) -> Self {
        let full = base + comptime!(barriers_at as u32);
        let empty = full + comptime!(8 * stages as u32);
        Ring { base, full, empty }
    }

    /// Initializes the mbarriers. A stage is full after `fillers` arrivals and the announced bytes,
    /// and empty after `readers` arrivals.
    pub(crate) fn init(&self, #[comptime] stages: usize, #[comptime] fillers: u32, #[comptime] readers: u32) {
        #[unroll]
        for stage in 0..comptime!(stages as u32) {
            mbarrier_init(self.full + comptime!(8 * stage), fillers);
            mbarrier_init(self.empty + comptime!(8 * stage), readers);
        }
    }

    /// Mbarrier of a full stage.
    pub(crate) fn full(&self, stage: u32) -> u32 {
        self.full + 8 * stage
    }

    /// Mbarrier of an empty stage.
    pub(crate) fn empty(&self, stage: u32) -> u32 {
        self.empty + 8 * stage
    }

    /// Waits until the stage is full. Without `traps`, [`drain`](Self::drain) must detect that it
    /// never becomes full.
    pub(crate) fn wait_full(&self, place: &RingPlace, #[comptime] traps: bool) {
        mbarrier_wait(self.full(place.at), place.parity, traps);
    }

    /// Waits until the stage is empty.
    pub(crate) fn wait_empty(&self, place: &RingPlace) {
        mbarrier_wait(self.empty(place.at), place.parity, true);
    }

    /// Waits until all stages are empty. `place` follows the last filled stage.
    pub(crate) fn drain(&self, place: &mut RingPlace, #[comptime] stages: usize) {
        for _ in 0..comptime!(stages as u32) {
            self.wait_empty(place);
            advance(place, comptime!(stages as u32));
        }
    }
}

/// Arrives at the mbarrier at `barrier` in block `rank` of a cluster of `cluster` blocks. `rank` is
/// 0 for a single block.
#[cube]
pub(in crate::gemm) fn arrive(barrier: u32, rank: u32, #[comptime] cluster: u32) {
    if comptime!(cluster > 1) {
        mbarrier_arrive_remote(barrier, rank);
    } else {
        mbarrier_arrive(barrier);
    }
}

/// Addresses of A and of B in a stage.
#[cube]
pub(in crate::gemm) fn stage_operands(base: u32, stage: u32, #[comptime] layout: Layout) -> (u32, u32) {
    let a = base + stage * comptime!(layout.stage_a as u32);
    let b = base + comptime!(layout.tiles_b_at() as u32) + stage * comptime!(layout.stage_b as u32);
    (a, b)
}

/// Address of a stage's scales.
#[cube]
pub(in crate::gemm) fn stage_scales(base: u32, stage: u32, #[comptime] layout: Layout) -> u32 {
    base + comptime!(layout.scales_at() as u32) + stage * comptime!(layout.stage_scales as u32)
}

/// Position in a ring of stages or buffers, and the parity of its mbarrier in this round.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct RingPlace {
    pub(crate) at: u32,
    pub(crate) parity: u32,
}

/// Position 0, with this parity.
#[cube]
pub(crate) fn first_place(#[comptime] parity: u32) -> RingPlace {
    RingPlace { at: 0u32.runtime(), parity: parity.runtime() }
}

/// Advances to the next of `count` positions.
#[cube]
pub(crate) fn advance(place: &mut RingPlace, #[comptime] count: u32) {
    place.at += 1;
    if place.at == count {
        place.at = 0u32;
        place.parity ^= 1u32;
    }
}
