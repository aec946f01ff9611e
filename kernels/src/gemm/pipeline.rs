//! What the GEMMs that TMA feeds keep count of: their tiles, and the stages of their pipelines.

use core::sync::atomic::{AtomicBool, Ordering};

use cubecl::prelude::*;

use super::grouped::Work;

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
    /// Which part of a contraction that is summed in parts.
    pub(super) split: u32,
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
