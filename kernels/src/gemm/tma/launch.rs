//! A launch: the plan, then one pass over all tiles, and one more that adds up splits of the contraction.

use cubecl::prelude::*;

use super::item::ExtentLaunch;
use super::maps::{Target, sms};
use super::plan::{Machine, Plan, fixed_plan};
use super::split_k::combine;
use super::store::Store;
use crate::gemm::Gemm;
use crate::gemm::problem::ProblemLaunch;
use crate::source::Source;

/// A pass over all tiles of a GEMM.
pub(in crate::gemm) struct Pass<'a> {
    gemm: &'a Gemm<'a>,
    pub(in crate::gemm) plan: Plan,
    /// Where the tiles go.
    pub(in crate::gemm) target: &'a Target,
    /// Steps of the whole contraction.
    steps: usize,
    sms: usize,
}

/// Has `launch` make the tiles of a GEMM, and adds up the splits of the contraction if there are
/// several. The kernel sums `step` of the contraction a stage.
pub(in crate::gemm) fn launch<R: Runtime>(
    client: &ComputeClient<R>,
    gemm: &Gemm,
    machine: &impl Machine,
    step: usize,
    launch: impl FnOnce(&Pass),
) {
    let (steps, sms) = (gemm.a.k.div_ceil(step), sms(client));
    let fixed = fixed_plan().and_then(|fixed| Plan::fixed(machine, fixed));
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
    /// Whether the tiles are sums of one split of the contraction.
    const fn is_partial(&self) -> bool {
        self.plan.splits > 1
    }

    /// Rows of the output, with those of all groups' tiles, a cluster's each.
    fn rows(&self) -> usize {
        let height = self.plan.height();
        self.gemm.row_tiles(height) * height
    }

    /// How tiles are stored.
    pub(in crate::gemm) fn store(&self) -> Store {
        Store {
            tma: self.target.tma_store,
            partial: self.is_partial(),
            accumulate: self.gemm.accumulate && !self.is_partial(),
            dtype: Source::of(self.target.dtype).expect("checked by scaled_gemm"),
        }
    }

    /// The kernel's argument: scales, groups and sizes, and the bias that it adds, which partial sums do without.
    pub(in crate::gemm) fn problem<R: Runtime>(&self) -> ProblemLaunch<R> {
        ProblemLaunch::of(self.gemm, self.gemm.bias.as_ref().filter(|_| !self.is_partial()))
    }

    /// The kernel's argument: how the work on `columns` of a matrix is divided.
    pub(in crate::gemm) fn extent<R: Runtime>(&self, columns: usize) -> ExtentLaunch<R> {
        let (rows, cols) = (self.plan.row_clusters(self.rows()), columns.div_ceil(self.plan.tile.cols));
        ExtentLaunch::new(self.steps as u32, rows as u32, cols as u32, self.plan.splits as u32)
    }

    /// As many blocks as run at once, or as have work.
    pub(in crate::gemm) fn cubes(&self, columns: usize) -> CubeCount {
        let at_once = (self.sms / self.plan.cluster).max(1);
        let clusters = self.plan.items(self.rows(), columns).min(at_once);
        CubeCount::Static((clusters * self.plan.cluster) as u32, 1, 1)
    }
}
