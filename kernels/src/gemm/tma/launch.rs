//! Launches of TMA GEMMs: the plan, one pass over all tiles, and one that adds the splits of the
//! contraction.

use cubecl::prelude::*;

use super::item::ExtentLaunch;
use super::maps::{Target, sms};
use super::plan::{GemmPlan, Machine, fixed_plan};
use super::split_k::combine;
use super::store::Store;
use crate::element_type::ElementType;
use crate::gemm::Gemm;
use crate::gemm::problem::ProblemLaunch;

/// A pass over all tiles of a GEMM.
pub(in crate::gemm) struct Pass<'a> {
    gemm: &'a Gemm<'a>,
    pub(in crate::gemm) plan: GemmPlan,
    /// Destination of the tiles.
    pub(in crate::gemm) target: &'a Target,
    /// Steps of the whole contraction.
    steps: usize,
    sms: usize,
}

/// Runs `launch` for the tiles of a GEMM, then adds the splits of the contraction if there are
/// several. The kernel sums `step` of the contraction per stage.
pub(in crate::gemm) fn launch<R: Runtime>(
    client: &ComputeClient<R>,
    gemm: &Gemm,
    machine: &impl Machine,
    step: usize,
    launch: impl FnOnce(&Pass),
) {
    let (steps, sms) = (gemm.a.k.div_ceil(step), sms(client));
    let fixed = fixed_plan().and_then(|fixed| GemmPlan::fixed(machine, fixed));
    let plan = fixed.unwrap_or(gemm.plan);
    let rows = plan.padded_rows(gemm.matrices().0);
    let is_split = plan.splits > 1;
    let target = if is_split { Target::partials(client, gemm, plan.splits, rows) } else { Target::output(gemm) };
    launch(&Pass { gemm, plan, target: &target, steps, sms });
    if is_split {
        combine(client, gemm, &target, plan.splits, rows);
    }
}

impl Pass<'_> {
    /// Whether the tiles are partial sums of a split contraction.
    const fn is_partial(&self) -> bool {
        self.plan.splits > 1
    }

    /// Rows of the output, including the padding rows of all groups' cluster tiles.
    fn rows(&self) -> usize {
        let height = self.plan.height();
        self.gemm.shape().row_tiles(height) * height
    }

    /// Store mode of the tiles.
    pub(in crate::gemm) fn store(&self) -> Store {
        Store {
            tma: self.target.tma_store,
            partial: self.is_partial(),
            dtype: ElementType::of(self.target.dtype).expect("checked by scaled_gemm"),
        }
    }

    /// Kernel argument: scales, groups, sizes and the bias. Partial sums have no bias.
    pub(in crate::gemm) fn problem<R: Runtime>(&self) -> ProblemLaunch<R> {
        ProblemLaunch::of(self.gemm, self.gemm.bias.as_ref().filter(|_| !self.is_partial()))
    }

    /// Kernel argument: division of the work on `columns` of a matrix.
    pub(in crate::gemm) fn extent<R: Runtime>(&self, columns: usize) -> ExtentLaunch<R> {
        let (rows, cols) = (self.plan.row_clusters(self.rows()), columns.div_ceil(self.plan.tile.cols));
        ExtentLaunch::new(self.steps as u32, rows as u32, cols as u32, self.plan.splits as u32)
    }

    /// Number of blocks that run at once, or that have work if fewer.
    pub(in crate::gemm) fn cubes(&self, columns: usize) -> CubeCount {
        let at_once = (self.sms / self.plan.cluster).max(1);
        let clusters = self.plan.items(self.rows(), columns).min(at_once);
        CubeCount::Static((clusters * self.plan.cluster) as u32, 1, 1)
    }
}
