//! A plan that measurements put in the place of the estimate's.

use std::sync::Mutex;

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
    *FIXED.lock().unwrap_or_else(|poisoned| poisoned.into_inner()) = plan;
}

pub(in crate::gemm) fn fixed_plan() -> Option<FixedPlan> {
    *FIXED.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}
