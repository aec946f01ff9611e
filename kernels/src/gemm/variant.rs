//! [`select()`]: chooses the path and compile-time parameters of a GEMM before launch.

use core::fmt;

use cubecl::ir::StorageType;
use cubecl::prelude::*;

use super::tma::plan::GemmPlan;
use super::tma::ring::MAX_STAGES;
use super::{GEMV_ROWS, GemmConfig, GemmPath, GemmShape, Grouping, emulated, gemm_plan, half, mma};
use crate::arch::{CudaArch, cuda_arch};
use crate::denylist::{Disabled, device_key};
use crate::element_type::ElementType;
use crate::granularity::BLOCK;
use crate::ptx::cvt::Isa;
use crate::{Format, Granularity};

/// Device properties that [`select()`] uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GemmDevice {
    key: usize,
    pub(super) arch: Option<CudaArch>,
    sms: Option<u32>,
    /// Matrix units for f16 and for bf16.
    units: [Option<half::Units>; 2],
}

impl GemmDevice {
    /// Properties of a client's device.
    pub fn of<R: Runtime>(client: &ComputeClient<R>) -> Self {
        Self {
            key: device_key(client),
            arch: cuda_arch(client),
            sms: client.properties().hardware.num_streaming_multiprocessors,
            units: [ElementType::F16, ElementType::Bf16].map(|element| half::Units::of(client, element)),
        }
    }

    /// Kernels that are now disabled on the device.
    pub fn disabled(&self) -> Disabled {
        Disabled::on(self.key)
    }

    /// Current path of a GEMM, [`GemmPath::Host`] if no kernel is left. `rows` are the output's
    /// rows, or `None` with groups.
    pub fn path(&self, rows: Option<usize>, granularities: [Granularity; 2], config: GemmConfig) -> GemmPath {
        select_path(self, rows, granularities, config.emulate, &self.disabled()).unwrap_or(GemmPath::Host)
    }

    /// Whether the device has instructions for casts that are not disabled.
    pub fn has_casts(&self) -> bool {
        Isa::among(self.arch, &self.disabled()).is_some()
    }

    /// Matrix units for operands of these granularities.
    fn units(&self, granularities: [Granularity; 2]) -> Option<half::Units> {
        self.units[usize::from(Granularity::any_mx(granularities))]
    }
}

/// Description of a GEMM for [`select()`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct GemmProblem {
    /// Formats of the operands.
    pub formats: [Format; 2],
    /// Sizes, granularities, accumulation and groups.
    pub shape: GemmShape,
    /// Dtype of the bias.
    pub bias: Option<StorageType>,
    /// Dtype of the output.
    pub dtype: StorageType,
    /// Whether [`GemmPath::Emulated`] is requested.
    pub emulate: bool,
}

/// Most splits of the contraction that self-checks run.
pub(super) const JUDGED_SPLITS: usize = 2;

/// Most shared memory of a block, in bytes.
const MAX_SHARED: usize = 227 * 1024;

/// Path and compile-time parameters of a GEMM.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct GemmVariant {
    /// The path.
    pub path: GemmPath,
    /// Small product that compiles to the same kernels.
    pub small: GemmProblem,
    pub(super) plan: GemmPlan,
    /// Conversion instructions of the kernels that use some, otherwise
    /// [`Portable`](Isa::Portable).
    pub(super) isa: Isa,
}

/// Path of a GEMM: the device's first kernel that is not disabled. `None` if none is left.
///
/// The order is [`GemmPath::Gemv`] for at most [`GEMV_ROWS`] rows on CUDA, the architecture's path,
/// [`GemmPath::F16Mma`], [`GemmPath::Emulated`].
fn select_path(
    device: &GemmDevice,
    rows: Option<usize>,
    granularities: [Granularity; 2],
    emulate: bool,
    disabled: &Disabled,
) -> Option<GemmPath> {
    let gemv = device.arch.filter(|_| rows.is_some_and(|rows| rows <= GEMV_ROWS)).map(|_| GemmPath::Gemv);
    let native = match device.arch.filter(|_| Granularity::on_tensor_cores(granularities)) {
        Some(CudaArch::Sm100) => Some(GemmPath::Tcgen05),
        Some(CudaArch::Sm90) if Granularity::any_mx(granularities) => Some(GemmPath::Bf16Wgmma),
        Some(CudaArch::Sm90) => Some(GemmPath::Wgmma),
        Some(CudaArch::Sm89 | CudaArch::Sm120) => Some(GemmPath::Mma),
        Some(CudaArch::Sm80) | None => None,
    };
    let half = device.units(granularities).map(|_| GemmPath::F16Mma);
    let paths = if emulate { [None; 3] } else { [gemv, native, half] };
    let mut paths = paths.into_iter().flatten().chain([GemmPath::Emulated]);
    paths.find(|path| !disabled.contains((*path, granularities)))
}

/// Path and compile-time parameters of a GEMM on this device. `None` if all of its kernels are
/// disabled there.
pub fn select(device: &GemmDevice, problem: &GemmProblem, disabled: &Disabled) -> Option<GemmVariant> {
    let GemmShape { product: [m, ..], granularities, groups, .. } = problem.shape;
    let path = select_path(device, groups.is_none().then_some(m), granularities, problem.emulate, disabled)?;
    let sms = device.sms.unwrap_or(1);
    let plan = match path {
        GemmPath::Mma => GemmPlan::of_tile(mma::tile(&problem.shape, sms)),
        GemmPath::F16Mma => GemmPlan::of_tile(device.units(granularities)?.tile(&problem.shape, sms)),
        _ => gemm_plan(path, &problem.shape, sms as usize)
            .unwrap_or(GemmPlan::of_tile([if m <= emulated::FEW { emulated::FEW as u32 - 3 } else { 128 }, 128])),
    };
    let shape = GemmShape {
        product: judged_product(path, &plan, &problem.shape),
        groups: groups.map(|(grouping, _)| (grouping, 3)),
        ..problem.shape
    };
    let isa = match path {
        GemmPath::Gemv | GemmPath::Bf16Wgmma => Isa::among(device.arch, disabled).unwrap_or(Isa::Portable),
        _ => Isa::Portable,
    };
    Some(GemmVariant { path, small: GemmProblem { shape, ..*problem }, plan, isa })
}

/// Small product that compiles to the same kernels as `shape` by this path: ragged, with several
/// tiles and two rounds of a ring for each split.
pub(super) fn judged_product(path: GemmPath, plan: &GemmPlan, shape: &GemmShape) -> [usize; 3] {
    let GemmShape { product: [m, n, k], groups, .. } = *shape;
    let is_few = groups.is_none() && m <= GEMV_ROWS;
    // If each matrix has a multiple of 128 columns, no two share a 128x128 block of scales.
    let is_whole = matches!(groups, Some((Grouping::Rows, _))) && n.is_multiple_of(BLOCK);
    let width = plan.tile.cols;
    let cols = if is_whole { width.next_multiple_of(BLOCK) + BLOCK } else { width + (1 << n.trailing_zeros().min(3)) };
    let blocks = rounds(path, plan, groups, is_few) + [4, 1, 2, 1][k.div_ceil(BLOCK) % 4];
    [if is_few { m } else { plan.height() + 2 }, cols, blocks * BLOCK - 37]
}

/// Blocks of the contraction in two rounds of a kernel's ring, for each split and for the longest
/// group. A multiple of four, so that the blocks after them determine the width of scale loads.
fn rounds(path: GemmPath, plan: &GemmPlan, groups: Option<(Grouping, usize)>, is_few: bool) -> usize {
    let stages = MAX_STAGES.min(MAX_SHARED / ((plan.tile.rows + plan.tile.cols / plan.cluster) * BLOCK));
    let ring = match path {
        GemmPath::Wgmma | GemmPath::Tcgen05 => 2 * stages,
        // A stage is half a block.
        GemmPath::Bf16Wgmma => stages,
        // 16 codes for each of 128 units.
        GemmPath::Gemv => return 32,
        GemmPath::Emulated if !is_few => return 4,
        // Up to four stages of half a block, or 4 codes for each of 64 units.
        GemmPath::Mma | GemmPath::F16Mma | GemmPath::Emulated | GemmPath::Host => return 8,
    };
    // The longest group has two thirds of the contraction.
    let blocks = if matches!(groups, Some((Grouping::Contraction, _))) { 3 * ring.div_ceil(2) } else { ring };
    (blocks * plan.splits.min(JUDGED_SPLITS)).next_multiple_of(4)
}

impl GemmVariant {
    /// Variant that self-checks run for this one: the same kernels, with at most two splits of the
    /// contraction.
    pub fn judged(self) -> Self {
        Self { plan: GemmPlan { splits: self.plan.splits.min(JUDGED_SPLITS), ..self.plan }, ..self }
    }
}

impl fmt::Display for GemmVariant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let GemmProblem { formats: [a, b], shape, bias, dtype, .. } = self.small;
        let ([m, n, k], [left, right]) = (shape.product, shape.granularities);
        write!(f, "[{m}, {k}] · [{n}, {k}]ᵀ, {a}, {b} {left}, {right} to {dtype}")?;
        bias.iter().try_for_each(|bias| write!(f, ", {bias} bias"))?;
        shape.groups.iter().try_for_each(|(grouping, _)| write!(f, ", groups of {grouping:?}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use GemmPath::{Bf16Wgmma, Emulated, F16Mma, Gemv, Mma, Tcgen05, Wgmma};

    const ROWWISE: [Granularity; 2] = [Granularity::Row; 2];
    const MX: [Granularity; 2] = [Granularity::Block1x32; 2];
    const MIXED: [Granularity; 2] = [Granularity::Block1x32, Granularity::Row];

    /// Architecture, matrix units, operands, and paths for many rows in the order that the test
    /// disables them.
    type Case = (Option<CudaArch>, bool, [Granularity; 2], &'static [GemmPath]);

    #[rustfmt::skip]
    const PATHS: &[Case] = &[
        (None, false, ROWWISE, &[Emulated]),
        (None, true, MX, &[F16Mma, Emulated]),
        (Some(CudaArch::Sm80), true, ROWWISE, &[F16Mma, Emulated]),
        (Some(CudaArch::Sm89), true, MX, &[Mma, F16Mma, Emulated]),
        (Some(CudaArch::Sm90), true, ROWWISE, &[Wgmma, F16Mma, Emulated]),
        (Some(CudaArch::Sm90), true, MX, &[Bf16Wgmma, F16Mma, Emulated]),
        (Some(CudaArch::Sm90), true, MIXED, &[F16Mma, Emulated]),
        (Some(CudaArch::Sm100), true, MX, &[Tcgen05, F16Mma, Emulated]),
        (Some(CudaArch::Sm120), true, MIXED, &[F16Mma, Emulated]),
    ];

    /// An instruction that a cast disables makes another variant of the kernels that use it.
    #[test]
    fn variants_of_other_instructions_differ() {
        let dtype = ElementType::F32.storage();
        let device = GemmDevice { key: 0, arch: Some(CudaArch::Sm90), sms: Some(132), units: [None; 2] };
        let mut disabled = Disabled::default();
        disabled.add(Isa::PtxFp8);
        for (rows, granularities, differs) in [(2, ROWWISE, true), (300, MX, true), (300, ROWWISE, false)] {
            let product = [rows, 300, 500];
            let shape = GemmShape { product, granularities, power_of_two: false, use_fast_accum: false, groups: None };
            let problem = GemmProblem { formats: [Format::E4m3; 2], shape, bias: None, dtype, emulate: false };
            let [before, after] = [&Disabled::default(), &disabled].map(|disabled| select(&device, &problem, disabled));
            assert_eq!(before != after, differs, "{rows} rows, {granularities:?}");
        }
    }

    /// The contraction has two rounds of a ring for each split, a ragged end, and sums of at most
    /// 13 bits.
    #[test]
    fn the_judged_product_has_two_rounds() {
        let dtype = ElementType::F32.storage();
        for (arch, granularities, stage) in
            [(CudaArch::Sm90, ROWWISE, 128), (CudaArch::Sm90, MX, 64), (CudaArch::Sm100, MX, 128)]
        {
            let device = GemmDevice { key: 0, arch: Some(arch), sms: Some(132), units: [None; 2] };
            let products = [[4096, 4096, 4096], [128, 4096, 14336], [64, 256, 8192], [300, 100, 900]];
            let groupings = [None, Some((Grouping::Rows, 4)), Some((Grouping::Contraction, 4))];
            for (product, groups) in products.into_iter().flat_map(|product| groupings.map(|groups| (product, groups)))
            {
                let shape = GemmShape { product, granularities, power_of_two: true, use_fast_accum: false, groups };
                let problem = GemmProblem { formats: [Format::E4m3; 2], shape, bias: None, dtype, emulate: false };
                let variant = select(&device, &problem, &Disabled::default()).expect("no kernel is disabled").judged();
                let GemmPlan { tile, cluster, splits } = variant.plan;
                let [_, _, k] = variant.small.shape.product;
                // Scales, chunks and barriers leave less.
                let stages = (MAX_SHARED / ((tile.rows + tile.cols / cluster) * 128)).min(8);
                let share = if matches!(groups, Some((Grouping::Contraction, _))) { k * 2 / 3 } else { k / splits };
                assert!(share >= 2 * stages * stage, "{variant}: {stages} stages, {splits} splits");
                assert!(k < 1 << 13 && !k.is_multiple_of(stage), "{variant}");
            }
        }
    }

    #[test]
    fn each_path_follows_the_disabled_one() {
        let dtype = ElementType::F32.storage();
        for &(arch, has_units, granularities, paths) in PATHS {
            let units = [has_units.then(half::Units::all); 2];
            let device = GemmDevice { key: 0, arch, sms: Some(132), units };
            for (rows, groups) in [(300, None), (2, None), (2, Some((Grouping::Rows, 3)))] {
                let product = [rows, 300, 500];
                let shape = GemmShape { product, granularities, power_of_two: false, use_fast_accum: false, groups };
                let mut problem = GemmProblem { formats: [Format::E4m3; 2], shape, bias: None, dtype, emulate: false };
                let gemv = arch.filter(|_| rows == 2 && groups.is_none()).map(|_| Gemv);
                let mut disabled = Disabled::default();
                for path in gemv.iter().chain(paths) {
                    let variant = select(&device, &problem, &disabled).expect("a path is left");
                    assert_eq!(variant.path, *path, "{arch:?}, {granularities:?}, {rows} rows, {groups:?}");
                    disabled.add((*path, granularities));
                    disabled.add((*path, [Granularity::Tensor; 2]));
                }
                assert_eq!(select(&device, &problem, &disabled), None);
                problem.emulate = true;
                assert_eq!(select(&device, &problem, &Disabled::default()).map(|variant| variant.path), Some(Emulated));
            }
        }
    }
}
