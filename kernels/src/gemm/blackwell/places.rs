//! [`Places`]: where the kernel's stages and mbarriers are.

use cubecl::prelude::*;

use crate::gemm::tma::ring::Ring;

/// The stages, and addresses of the mbarriers of sums.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Places {
    pub(super) ring: Ring,
    /// Of sums that are finished.
    pub(super) ready: u32,
    /// Of sums that have been read, so that others may take their place.
    pub(super) read: u32,
}
