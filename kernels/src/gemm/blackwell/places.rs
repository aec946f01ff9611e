//! [`Places`]: where the kernel's stages and mbarriers are.

use cubecl::prelude::*;

use crate::gemm::tma::ring::Ring;

/// The stages, and addresses of the mbarriers of sums.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Places {
    pub(super) ring: Ring,
    /// Address of the first mbarrier of finished sums.
    pub(super) ready: u32,
    /// Address of the first mbarrier of sums that have been read, so that others may take their place.
    pub(super) read: u32,
}
