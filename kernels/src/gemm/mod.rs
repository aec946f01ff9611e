//! `out = (A · Bᵀ) · (inv_scale_a · inv_scale_b) + bias` for any two granularities. Checks the
//! arguments and selects the kernel for the device.

mod blackwell;
mod bound;
mod emulated;
mod gemv;
mod grouped;
mod half;
mod halves;
mod hopper;
mod mma;
mod problem;
mod schedule;
pub(crate) mod tma;
mod variant;

use core::fmt;

use cubecl::ir::StorageType;
use cubecl::prelude::*;
use cubecl::server::Handle;

pub use gemv::GEMV_ROWS;
pub use grouped::{GROUP_ALIGN, Grouping, Groups, grouped_scaled_gemm};
pub use halves::{HalfGemm, HalfGemmProblem, HalfGemmVariant, disable_half_gemm, has_half_gemm};
pub use tma::plan::{FixedPlan, GemmPlan, GemmShape, GemmTile, fix_gemm_plan};
pub use variant::{GemmDevice, GemmProblem, GemmVariant, select};

use crate::denylist::disable;
use crate::element_type::ElementType;
use crate::operand::check_size;
use crate::ptx::cvt::Isa;
use crate::view::{Checked, check_aligned, check_bytes};
use crate::{Format, Granularity, KernelError, Operand, VectorView, supports};

/// Implementation of a GEMM. `docs/dev/verified.md` in the repository lists what has run on a GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum GemmPath {
    /// TMA and `tcgen05`, on data-center Blackwell. The tensor cores apply E8M0 scales, and
    /// 128-block scales if all are powers of two ([`Operand::power_of_two`]).
    Tcgen05,
    /// TMA and FP8 `wgmma`, on Hopper.
    Wgmma,
    /// The `wgmma` kernel with bf16 operands, which an earlier launch writes. For operands with
    /// E8M0 scales on Hopper, whose FP8 tensor cores cannot apply them.
    Bf16Wgmma,
    /// FP8 tensor cores through `mma.sync`. On sm_89, E8M0 scales multiply the sums of each 32. On
    /// sm_120 the tensor cores apply them; other operands have unit scales there.
    Mma,
    /// Decodes to f16 in the tile, or to bf16 if an operand has E8M0 scales, and multiplies on
    /// 16-bit matrix units with f32 sums. For CUDA devices without a matching FP8 kernel, and for
    /// devices of other runtimes that offer CubeCL cooperative matrices.
    F16Mma,
    /// GEMV on CUDA for up to [`GEMV_ROWS`] rows, as in decoding. Loads each code of B once and
    /// decodes in registers; f32 sums.
    Gemv,
    /// Decodes in the tile, f32 multiply-add. Runs on any device.
    Emulated,
    /// No kernel: codes are decoded on the host. CPUs multiply them there in f32. A CubeCL device
    /// uses it only if all of its kernels are disabled ([`disable_path`](crate::disable_path)).
    Host,
}

impl GemmPath {
    /// Whether the path has FP8's speed: it uses FP8 tensor cores, or is bound by reading the
    /// codes.
    pub fn is_native(self) -> bool {
        match self {
            GemmPath::Mma | GemmPath::Wgmma | GemmPath::Tcgen05 | GemmPath::Gemv => true,
            GemmPath::Host | GemmPath::Emulated | GemmPath::F16Mma | GemmPath::Bf16Wgmma => false,
        }
    }

    /// Reason why it is slower than the FP8 path of other granularities on the same device. `None`
    /// if it is not slower.
    pub const fn cost(self) -> Option<&'static str> {
        match self {
            GemmPath::Bf16Wgmma => {
                Some("no FP8 product with MX scales on Hopper: bf16's speed at best, 2 (M + N) K bytes more")
            }
            _ => None,
        }
    }
}

impl fmt::Display for GemmPath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            GemmPath::Tcgen05 => "tcgen05",
            GemmPath::Wgmma => "wgmma",
            GemmPath::Bf16Wgmma => "bf16 wgmma",
            GemmPath::Mma => "mma",
            GemmPath::F16Mma => "f16 mma",
            GemmPath::Gemv => "gemv",
            GemmPath::Emulated => "emulated",
            GemmPath::Host => "host",
        })
    }
}

/// Options of a GEMM, with torchao's names.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct GemmConfig {
    /// Sums the whole contraction in the tensor core's accumulator, with about 14 bits of mantissa
    /// on Hopper. Otherwise its sums are added to f32 registers every 128.
    ///
    /// No effect on [`GemmPath::Emulated`] and [`GemmPath::Gemv`], whose sums are f32. No effect on
    /// [`GemmPath::Bf16Wgmma`], [`GemmPath::F16Mma`] and [`GemmPath::Tcgen05`], which have no
    /// shorter accumulator. No effect if scales are applied every 128 or every 32.
    pub use_fast_accum: bool,
    /// Uses [`GemmPath::Emulated`] even if the device has FP8 tensor cores.
    pub emulate: bool,
}

/// Current path of [`scaled_gemm`] with many rows, and of [`grouped_scaled_gemm`], on this device.
pub fn gemm_path<R: Runtime>(
    client: &ComputeClient<R>,
    granularities: [Granularity; 2],
    config: GemmConfig,
) -> GemmPath {
    GemmDevice::of(client).path(None, granularities, config)
}

/// Plan with the fewest estimated cycles for a GEMM on a device of `sms` SMs. It is used unless
/// [`fix_gemm_plan`] overrides it. `None` for paths without TMA.
pub fn gemm_plan(path: GemmPath, shape: &GemmShape, sms: usize) -> Option<GemmPlan> {
    match path {
        GemmPath::Wgmma | GemmPath::Bf16Wgmma => Some(hopper::plan(shape, sms)),
        GemmPath::Tcgen05 => Some(blackwell::plan(shape, sms)),
        GemmPath::Mma | GemmPath::F16Mma | GemmPath::Gemv | GemmPath::Emulated | GemmPath::Host => None,
    }
}

/// Disables this path on this device for operands of these granularities.
pub fn disable_path<R: Runtime>(client: &ComputeClient<R>, path: GemmPath, granularities: [Granularity; 2]) {
    disable(client, (path, granularities));
}

/// Checked arguments of a GEMM, for every path.
#[derive(Clone)]
struct Gemm<'a> {
    a: &'a Operand,
    b: &'a Operand,
    bias: Option<Checked>,
    out: &'a Handle,
    dtype: StorageType,
    use_fast_accum: bool,
    groups: Option<&'a Groups>,
    plan: GemmPlan,
    /// Conversion instructions of [`GemmPath::Gemv`] and [`GemmPath::Bf16Wgmma`].
    isa: Isa,
    /// 16-bit matrices in place of the codes and scales of `a` and `b`.
    halves: Option<&'a halves::Halves>,
}

impl Gemm<'_> {
    /// Rows and columns of one output matrix, and the number of matrices.
    fn matrices(&self) -> (usize, usize, usize) {
        Groups::matrices(self.groups, [self.a, self.b])
    }

    /// Formats of the operands.
    const fn formats(&self) -> [Format; 2] {
        [self.a.format, self.b.format]
    }

    /// Shape that determines the plan.
    fn shape(&self) -> GemmShape {
        GemmShape::of([self.a, self.b], self.groups, self.use_fast_accum)
    }
}

/// `out [M, N] = (A [M, K] · B [N, K]ᵀ) · (inv_scale_a · inv_scale_b) + bias [N]`, contiguous, in
/// the dtype `out`.
///
/// Products are exact and sums are f32. Per-tensor and per-row scales are applied to the sum. If
/// either operand has block scales, the sum of each 128 of the contraction is scaled and added to a
/// second f32 sum (as in DeepGEMM):
///
/// ```text
/// out[i, j] = Σ_b (Σ_{k in block b} A[i, k] · B[j, k]) · (inv_scale_a[i, b] · inv_scale_b[j, b]) + bias[j]
/// ```
///
/// The two inverse scales are multiplied with each other first. The bias is added to the scaled
/// sum, and the result is rounded once. E8M0 scales multiply the codes' values instead, or the sums
/// of 32 products, which is exact. A NaN code makes every output that it contributes to NaN. The
/// bias and the output may have different dtypes, and the operands different granularities.
///
/// # Errors
/// [`KernelError::EmptyMatrix`] for a zero M, N or K,
/// [`ContractionMismatch`](KernelError::ContractionMismatch),
/// [`BiasMismatch`](KernelError::BiasMismatch), [`UnsupportedDtype`](KernelError::UnsupportedDtype)
/// for an `out` that the device cannot write, [`OutOfBounds`](KernelError::OutOfBounds) for codes,
/// scales or a bias that are too short, [`Misaligned`](KernelError::Misaligned),
/// [`TooLarge`](KernelError::TooLarge), [`Disabled`](KernelError::Disabled).
pub fn scaled_gemm<R: Runtime>(
    client: &ComputeClient<R>,
    a: &Operand,
    b: &Operand,
    bias: Option<&VectorView>,
    out: StorageType,
    config: GemmConfig,
) -> Result<Handle, KernelError> {
    GemmArgs { a, b, bias, groups: None, dtype: out, config }.run(client, None)
}

/// Arguments of a GEMM.
#[derive(Clone, Copy, Debug)]
pub struct GemmArgs<'a> {
    /// A.
    pub a: &'a Operand,
    /// B.
    pub b: &'a Operand,
    /// Bias, added to each row of the output. `None` with groups.
    pub bias: Option<&'a VectorView>,
    /// The groups of a grouped GEMM.
    pub groups: Option<&'a Groups>,
    /// Dtype of the output.
    pub dtype: StorageType,
    /// Accumulation and emulation options.
    pub config: GemmConfig,
}

impl GemmArgs<'_> {
    /// Description of the GEMM for [`select()`].
    pub fn problem(&self) -> GemmProblem {
        let &Self { a, b, bias, groups, dtype, config: GemmConfig { use_fast_accum, emulate } } = self;
        let shape = GemmShape::of([a, b], groups, use_fast_accum);
        GemmProblem { formats: [a.format, b.format], shape, bias: bias.map(|bias| bias.dtype), dtype, emulate }
    }

    /// Runs the GEMM into new memory, with a variant that [`select()`] returns for its
    /// [`problem`](Self::problem). `None` selects one.
    ///
    /// # Errors
    /// The errors of [`scaled_gemm`] and [`grouped_scaled_gemm`].
    pub fn run<R: Runtime>(
        &self,
        client: &ComputeClient<R>,
        variant: Option<&GemmVariant>,
    ) -> Result<Handle, KernelError> {
        let elements = self.check()?;
        let handle = client.empty(elements * ElementType::of(self.dtype)?.size());
        self.run_into(client, variant, &handle)?;
        Ok(handle)
    }

    /// Checks the operands, their fit, and that the output is indexable. Returns the output's
    /// elements.
    fn check(&self) -> Result<usize, KernelError> {
        let &Self { a, b, groups, .. } = self;
        a.check()?;
        b.check()?;
        if a.k != b.k {
            return Err(KernelError::ContractionMismatch { a: a.k, b: b.k });
        }
        groups.map_or(Ok(()), |groups| groups.check(b.rows))?;
        let (m, n, count) = Groups::matrices(groups, [a, b]);
        check_size(m.saturating_mul(count), n, n)?;
        Ok(m * n * count)
    }

    /// [`run`](Self::run) into existing memory, which is overwritten.
    ///
    /// # Errors
    /// As [`run`](Self::run), and [`KernelError::OutOfBounds`] and [`KernelError::Misaligned`] for the
    /// output's memory.
    pub fn run_into<R: Runtime>(
        &self,
        client: &ComputeClient<R>,
        variant: Option<&GemmVariant>,
        out: &Handle,
    ) -> Result<(), KernelError> {
        let &Self { a, b, bias, groups, dtype, config } = self;
        let elements = self.check()?;
        if !supports(client, dtype) {
            return Err(KernelError::UnsupportedDtype { dtype });
        }
        if let Some(bias) = bias.filter(|bias| bias.len != b.rows) {
            return Err(KernelError::BiasMismatch { bias: bias.len, n: b.rows });
        }
        let bias = bias.map(|bias| Checked::vector(client, bias)).transpose()?;
        let element_type = ElementType::of(dtype)?;
        check_bytes(out, (elements * element_type.size()) as u64, || format!("{elements} elements of the output"))?;
        check_aligned(out, client.properties().memory.alignment as usize)?;
        let selected = || {
            let device = GemmDevice::of(client);
            select(&device, &self.problem(), &device.disabled())
        };
        let GemmVariant { path, plan, isa, .. } = variant.copied().or_else(selected).ok_or(KernelError::Disabled)?;
        let (dtype, use_fast_accum) = (element_type.storage(), config.use_fast_accum);
        let gemm = Gemm { a, b, bias, out, dtype, use_fast_accum, groups, plan, isa, halves: None };
        match path {
            GemmPath::Tcgen05 => blackwell::launch(client, &gemm),
            GemmPath::Wgmma | GemmPath::Bf16Wgmma => hopper::launch(client, &gemm),
            GemmPath::Mma => mma::launch(client, &gemm),
            GemmPath::Gemv => gemv::launch(client, &gemm),
            GemmPath::F16Mma | GemmPath::Emulated if gemv::takes(client, &gemm) => gemv::launch(client, &gemm),
            GemmPath::F16Mma => half::launch(client, &gemm),
            GemmPath::Emulated => emulated::launch(client, &gemm),
            GemmPath::Host => return Err(KernelError::Disabled),
        }
        Ok(())
    }
}
