//! [`Places`]: where the kernel's stages and mbarriers are.

use cubecl::prelude::*;

/// Addresses in shared memory: where the stages begin, and the mbarriers.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Places {
    pub(super) base: u32,
    /// Of stages that TMA has filled.
    pub(super) full: u32,
    /// Of stages that have been multiplied.
    pub(super) empty: u32,
    /// Of sums that are finished.
    pub(super) ready: u32,
    /// Of sums that have been read, so that others may take their place.
    pub(super) read: u32,
}
