//! [`GemmVariant`]: compile-time parameters of a GEMM, and the shape of a small product that
//! compiles to the same kernels.

use core::fmt;

use cubecl::ir::StorageType;
use cubecl::prelude::*;
use cubecl::server::Handle;

use super::tma::plan::Plan;
use super::{
    GEMV_ROWS, Gemm, GemmConfig, GemmPath, GemmShape, Grouping, Groups, Tiling, emulated, gemm_path_of_rows, gemm_plan,
};
use super::{half, mma};
use crate::granularity::BLOCK;
use crate::view::Checked;
use crate::{Format, Granularity, KernelError, Operand, VectorView};

/// Compile-time parameters of a GEMM.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct GemmVariant {
    /// The path.
    pub path: GemmPath,
    /// Formats of the operands.
    pub formats: [Format; 2],
    /// Granularities of the operands.
    pub granularities: [Granularity; 2],
    /// Whether all scales are powers of two.
    pub power_of_two: bool,
    /// The bias's dtype.
    pub bias: Option<StorageType>,
    /// The output's dtype.
    pub dtype: StorageType,
    /// Whether tensor cores sum all of the contraction.
    pub use_fast_accum: bool,
    /// The axis that groups divide.
    pub grouping: Option<Grouping>,
    /// M, N of one matrix and K of the small product: ragged, with several tiles and several rounds
    /// of a ring.
    pub shape: [usize; 3],
    tiling: Option<Tiling>,
}

impl GemmVariant {
    /// The variant that [`scaled_gemm`](crate::scaled_gemm) runs on this device, or with groups
    /// [`grouped_scaled_gemm`](crate::grouped_scaled_gemm).
    pub fn of<R: Runtime>(
        client: &ComputeClient<R>,
        formats: [Format; 2],
        like: &GemmShape,
        (bias, dtype): (Option<StorageType>, StorageType),
        emulate: bool,
    ) -> Self {
        let &GemmShape { product: [m, n, k], granularities, power_of_two, use_fast_accum, groups } = like;
        let is_few = groups.is_none() && m <= GEMV_ROWS;
        let config = GemmConfig { use_fast_accum, emulate };
        let path = gemm_path_of_rows(client, groups.is_none().then_some(m), granularities, config);
        let sms = client.properties().hardware.num_streaming_multiprocessors.unwrap_or(1);
        let tiling = match path {
            GemmPath::Mma => Some(Tiling::Tile(mma::tile(like, sms))),
            GemmPath::F16Mma => Some(Tiling::Tile(half::tile(client, like))),
            _ => gemm_plan(path, like, sms as usize)
                .map(|plan| Tiling::Plan(Plan { splits: plan.splits.min(2), ..plan })),
        };
        let [height, width] = match tiling {
            Some(Tiling::Plan(plan)) => [plan.height(), plan.tile.cols],
            Some(Tiling::Tile(size)) => size.map(|side| side as usize),
            None => [if m <= emulated::FEW { emulated::FEW - 3 } else { 128 }, 128],
        };
        // Matrices of whole blocks of 128 columns share no square of scales.
        let is_whole = grouping(like) == Some(Grouping::Rows) && n.is_multiple_of(BLOCK);
        let cols =
            if is_whole { width.next_multiple_of(BLOCK) + BLOCK } else { width + (1 << n.trailing_zeros().min(3)) };
        // Blocks of the contraction: several rounds of every ring, and every width of loads of scales.
        let rounds = match path {
            GemmPath::Gemv => 32,
            GemmPath::Emulated if !is_few => 4,
            _ => 8,
        };
        let blocks = rounds + [4, 1, 2, 1][k.div_ceil(BLOCK) % 4];
        let rows = if is_few { m } else { height + 2 };
        let shape = [rows, cols, blocks * BLOCK - 37];
        let grouping = grouping(like);
        Self { path, formats, granularities, power_of_two, bias, dtype, use_fast_accum, grouping, shape, tiling }
    }

    /// Computes a product of operands of this variant into `out`.
    ///
    /// # Errors
    /// [`KernelError::Disabled`] if there is no kernel.
    pub(crate) fn run<R: Runtime>(
        &self,
        client: &ComputeClient<R>,
        [a, b]: [&Operand; 2],
        bias: Option<&VectorView>,
        groups: Option<&Groups>,
        out: &Handle,
    ) -> Result<(), KernelError> {
        let bias = bias.map(|bias| Checked::vector(client, bias)).transpose()?;
        let &Self { dtype, use_fast_accum, tiling, .. } = self;
        let gemm = Gemm { a, b, bias, out, dtype, accumulate: false, use_fast_accum, groups, tiling };
        gemm.launch(client, self.path)
    }
}

fn grouping(shape: &GemmShape) -> Option<Grouping> {
    shape.groups.map(|(grouping, _)| grouping)
}

impl fmt::Display for GemmVariant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { formats: [a, b], granularities: [left, right], bias, dtype, shape: [m, n, k], grouping, .. } = self;
        write!(f, "[{m}, {k}] · [{n}, {k}]ᵀ, {a}, {b} {left}, {right} to {dtype}")?;
        bias.iter().try_for_each(|bias| write!(f, ", {bias} bias"))?;
        grouping.iter().try_for_each(|grouping| write!(f, ", groups of {grouping:?}"))
    }
}
