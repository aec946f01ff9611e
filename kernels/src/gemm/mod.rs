//! `out = (A · Bᵀ) · (inv_scale_a · inv_scale_b) + bias` for any two granularities: checks, then the kernel that fits the
//! device.

mod blackwell;
mod bound;
mod emulated;
mod gemv;
mod grouped;
mod half;
mod hopper;
mod mma;
mod problem;
mod schedule;
mod tma;
mod variant;

use core::fmt;

use cubecl::ir::StorageType;
use cubecl::prelude::*;
use cubecl::server::Handle;

pub use gemv::GEMV_ROWS;
pub use grouped::{GROUP_ALIGN, Grouping, Groups, grouped_scaled_gemm};
pub use tma::plan::{FixedPlan, GemmShape, Plan as GemmPlan, Tile as GemmTile, fix_gemm_plan};
pub use variant::GemmVariant;

use crate::denylist::{disable, is_disabled};
use crate::operand::check_size;
use crate::source::Source;
use crate::view::{Checked, check_aligned, check_bytes};
use crate::{CudaArch, Format, Granularity, KernelError, Operand, VectorView, cuda_arch, supports};

/// What computes a GEMM. The repository's `docs/verified.md` says what has run on a GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum GemmPath {
    /// TMA and `tcgen05`: Blackwell of data centres, whose tensor cores apply E8M0 scales, and those of blocks of 128 where all are
    /// powers of two ([`Operand::power_of_two`]).
    Tcgen05,
    /// TMA and FP8 `wgmma`: Hopper.
    Wgmma,
    /// The kernel of `wgmma` with bf16 operands, which a launch before it writes: Hopper, where an operand has E8M0 scales, that its
    /// FP8 tensor cores know nothing of.
    Bf16Wgmma,
    /// FP8 tensor cores through `mma.sync`: sm_89, where E8M0 scales multiply the sums of each 32, and sm_120, block-scaled,
    /// where the tensor cores multiply by them; other operands have unit scales there.
    Mma,
    /// Decode to f16 in the tile, or to bf16 where an operand has E8M0 scales; multiply on 16-bit matrix units with f32 sums. For
    /// CUDA devices that no FP8 kernel here fits, and for devices of other runtimes that offer CubeCL cooperative matrices.
    F16Mma,
    /// Up to [`GEMV_ROWS`] rows on CUDA, as of a generated token: each code of B is loaded once and decoded in registers; f32 sums.
    Gemv,
    /// Decode in the tile, f32 multiply and add: any device.
    Emulated,
    /// No kernel: codes are decoded on the host. CPUs multiply them there in f32; a device of CubeCL takes it where all of its kernels
    /// were found to be wrong ([`disable_path`](crate::disable_path)).
    Host,
}

impl GemmPath {
    /// Whether it has FP8's speed: FP8 tensor cores do the work, or reading the codes takes longest.
    pub fn is_native(self) -> bool {
        match self {
            GemmPath::Mma | GemmPath::Wgmma | GemmPath::Tcgen05 | GemmPath::Gemv => true,
            GemmPath::Host | GemmPath::Emulated | GemmPath::F16Mma | GemmPath::Bf16Wgmma => false,
        }
    }

    /// Why it is slower than the FP8 path that operands of other granularities take on the same device; nothing where it is not.
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

/// How a GEMM may be computed; the names are torchao's.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct GemmConfig {
    /// Sum in the tensor core's own accumulator (about 14 bits of mantissa on Hopper) along the whole contraction, instead
    /// of adding its sums to f32 registers every 128 of it. Changes nothing on [`GemmPath::Emulated`] and [`GemmPath::Gemv`], whose
    /// sums are f32, on [`GemmPath::Bf16Wgmma`], [`GemmPath::F16Mma`] and [`GemmPath::Tcgen05`], which have no shorter accumulator, nor where
    /// scales are applied every 128 or every 32.
    pub use_fast_accum: bool,
    /// Take [`GemmPath::Emulated`] also where the device has FP8 tensor cores.
    pub emulate: bool,
}

/// The tile of a GEMM, on paths that have several.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Tiling {
    /// On paths that TMA feeds.
    Plan(tma::plan::Plan),
    /// Rows and columns.
    Tile([u32; 2]),
}

/// Path of a GEMM on this device. `rows` are the output's, or `None` with groups.
/// [`GemmPath::Gemv`] for at most [`GEMV_ROWS`] rows, if the device has it and it is not disabled;
/// else the path of [`gemm_path`].
pub fn gemm_path_of_rows<R: Runtime>(
    client: &ComputeClient<R>,
    rows: Option<usize>,
    granularities: [Granularity; 2],
    config: GemmConfig,
) -> GemmPath {
    let are_few = rows.is_some_and(|rows| rows <= GEMV_ROWS);
    let is_gemv = are_few && !config.emulate && cuda_arch(client).is_some();
    if is_gemv && !is_disabled(client, (GemmPath::Gemv, granularities)) {
        GemmPath::Gemv
    } else {
        gemm_path(client, granularities, config)
    }
}

/// The kernel that [`scaled_gemm`] of many rows and [`grouped_scaled_gemm`] dispatch to on this device for operands of these granularities:
/// the first of the device's own, [`GemmPath::F16Mma`] and [`GemmPath::Emulated`] that was not disabled.
pub fn gemm_path<R: Runtime>(
    client: &ComputeClient<R>,
    granularities: [Granularity; 2],
    config: GemmConfig,
) -> GemmPath {
    let arch = cuda_arch(client).filter(|_| Granularity::on_tensor_cores(granularities));
    let native = || match arch? {
        CudaArch::Sm100 => Some(GemmPath::Tcgen05),
        CudaArch::Sm90 if Granularity::any_mx(granularities) => Some(GemmPath::Bf16Wgmma),
        CudaArch::Sm90 => Some(GemmPath::Wgmma),
        CudaArch::Sm89 | CudaArch::Sm120 => Some(GemmPath::Mma),
        CudaArch::Sm80 => None,
    };
    let half = || half::Unit::of(client, half::element(granularities)).map(|_| GemmPath::F16Mma);
    let is_right = |path: &GemmPath| !is_disabled(client, (*path, granularities));
    let by_matrix_units = || native().filter(is_right).or_else(|| half().filter(is_right));
    let path = if config.emulate { None } else { by_matrix_units() };
    path.or_else(|| Some(GemmPath::Emulated).filter(is_right)).unwrap_or(GemmPath::Host)
}

/// The plan that an estimate of cycles chooses for such a GEMM on a device of `sms` SMs, and that is taken unless [`fix_gemm_plan`] has
/// set another; `None` for paths that TMA does not feed.
pub fn gemm_plan(path: GemmPath, shape: &GemmShape, sms: usize) -> Option<GemmPlan> {
    match path {
        GemmPath::Wgmma | GemmPath::Bf16Wgmma => Some(hopper::plan(shape, sms)),
        GemmPath::Tcgen05 => Some(blackwell::plan(shape, sms)),
        GemmPath::Mma | GemmPath::F16Mma | GemmPath::Gemv | GemmPath::Emulated | GemmPath::Host => None,
    }
}

/// From here on GEMMs of such operands take another path on this device than this one.
pub fn disable_path<R: Runtime>(client: &ComputeClient<R>, path: GemmPath, granularities: [Granularity; 2]) {
    disable(client, (path, granularities));
}

/// Where a GEMM writes: `[M, N]`, contiguous.
#[derive(Clone, Debug)]
pub struct Output {
    /// Memory of at least M · N elements.
    pub handle: Handle,
    /// f32, f16 or bf16.
    pub dtype: StorageType,
    /// Add to what the memory holds: `out ← out + result`, rounded once.
    pub accumulate: bool,
}

/// Checked arguments of a GEMM, as every path takes them.
#[derive(Clone)]
struct Gemm<'a> {
    a: &'a Operand,
    b: &'a Operand,
    bias: Option<Checked>,
    out: &'a Handle,
    dtype: StorageType,
    accumulate: bool,
    use_fast_accum: bool,
    groups: Option<&'a Groups>,
    /// The tile, where it is not chosen by the shape.
    tiling: Option<Tiling>,
}

impl Gemm<'_> {
    /// Rows and columns of one matrix of the output, and how many there are.
    fn matrices(&self) -> (usize, usize, usize) {
        let (m, n) = (self.a.rows, self.b.rows);
        self.groups.map_or((m, n, 1), |groups| groups.matrices(m, n))
    }

    /// Tiles of `height` rows along M, of all matrices of the output.
    fn row_tiles(&self, height: usize) -> usize {
        self.shape().row_tiles(height)
    }

    /// Tiles of `height` by `width`, of all matrices of the output.
    fn tiles(&self, size: [u32; 2]) -> u32 {
        self.shape().tiles(size)
    }

    /// Runs the kernel of a path.
    fn launch<R: Runtime>(&self, client: &ComputeClient<R>, path: GemmPath) -> Result<(), KernelError> {
        match path {
            GemmPath::Tcgen05 => blackwell::launch(client, self),
            GemmPath::Wgmma | GemmPath::Bf16Wgmma => hopper::launch(client, self),
            GemmPath::Mma => mma::launch(client, self),
            GemmPath::Gemv => gemv::launch(client, self),
            GemmPath::F16Mma | GemmPath::Emulated if gemv::takes(client, self) => gemv::launch(client, self),
            GemmPath::F16Mma => half::launch(client, self),
            GemmPath::Emulated => emulated::launch(client, self),
            GemmPath::Host => return Err(KernelError::Disabled),
        }
        Ok(())
    }

    /// What the groups divide.
    fn grouping(&self) -> Option<Grouping> {
        self.groups.map(|groups| groups.grouping)
    }

    /// Formats of the operands.
    const fn formats(&self) -> [Format; 2] {
        [self.a.format, self.b.format]
    }

    /// Granularities of the operands.
    const fn granularities(&self) -> [Granularity; 2] {
        [self.a.granularity, self.b.granularity]
    }

    /// Whether scales change along the contraction.
    const fn by_block(&self) -> bool {
        Granularity::any_blocks(self.granularities())
    }

    /// What its plan depends on.
    fn shape(&self) -> GemmShape {
        GemmShape::of([self.a, self.b], self.groups, self.use_fast_accum)
    }
}

/// `out [M, N] = (A [M, K] · B [N, K]ᵀ) · (inv_scale_a · inv_scale_b) + bias [N]`, contiguous, in the dtype `out`.
///
/// Products are exact and sums are f32. Scales of tensors and rows are applied to the sum; if either operand has blocks,
/// the sum of each 128 of the contraction is multiplied by their scales and added to a second f32 sum (as DeepGEMM does):
///
/// ```text
/// out[i, j] = Σ_b (Σ_{k in block b} A[i, k] · B[j, k]) · (inv_scale_a[i, b] · inv_scale_b[j, b]) + bias[j]
/// ```
///
/// The two inverse scales are multiplied with each other first. The bias is added to the scaled sum and the result is
/// rounded once. E8M0 scales multiply the codes' values instead, or the sums of 32 products, which is exact. A NaN code makes
/// NaN of every output that it contributes to. The bias may have another dtype than the output. The granularities of the
/// operands need not agree.
///
/// # Errors
/// [`KernelError::EmptyMatrix`] for a zero M, N or K, [`ContractionMismatch`](KernelError::ContractionMismatch),
/// [`BiasMismatch`](KernelError::BiasMismatch), [`UnsupportedDtype`](KernelError::UnsupportedDtype) for an `out` that the
/// device cannot write, [`BadOperand`](KernelError::BadOperand) and [`BadScales`](KernelError::BadScales) if codes or scales
/// are too short,
/// [`OutOfBounds`](KernelError::OutOfBounds) and [`Misaligned`](KernelError::Misaligned) for the bias,
/// [`TooLarge`](KernelError::TooLarge), [`Disabled`](KernelError::Disabled).
pub fn scaled_gemm<R: Runtime>(
    client: &ComputeClient<R>,
    a: &Operand,
    b: &Operand,
    bias: Option<&VectorView>,
    out: StorageType,
    config: GemmConfig,
) -> Result<Handle, KernelError> {
    check_operands(a, b)?;
    let handle = client.empty(a.rows * b.rows * Source::of(out)?.size());
    let output = Output { handle: handle.clone(), dtype: out, accumulate: false };
    scaled_gemm_into(client, a, b, bias, &output, config)?;
    Ok(handle)
}

/// [`scaled_gemm`] into memory that exists already, in place of what it holds or added to it.
///
/// With [`Output::accumulate`] this is a weight gradient summed over micro-batches: the old value is added to the scaled
/// f32 sum and the bias, and the result is rounded once.
///
/// # Errors
/// As [`scaled_gemm`], and [`OutOfBounds`](KernelError::OutOfBounds) and [`Misaligned`](KernelError::Misaligned) for the
/// output's memory.
pub fn scaled_gemm_into<R: Runtime>(
    client: &ComputeClient<R>,
    a: &Operand,
    b: &Operand,
    bias: Option<&VectorView>,
    out: &Output,
    config: GemmConfig,
) -> Result<(), KernelError> {
    check_operands(a, b)?;
    if !supports(client, out.dtype) {
        return Err(KernelError::UnsupportedDtype { dtype: out.dtype });
    }
    if let Some(bias) = bias.filter(|bias| bias.len != b.rows) {
        return Err(KernelError::BiasMismatch { bias: bias.len, n: b.rows });
    }
    let bias = bias.map(|bias| Checked::vector(client, bias)).transpose()?;
    let source = Source::of(out.dtype)?;
    check_bytes(&out.handle, (a.rows * b.rows * source.size()) as u64)?;
    check_aligned(&out.handle, client.properties().memory.alignment as usize)?;
    let dtype = source.storage();
    let (out, accumulate) = (&out.handle, out.accumulate);
    let gemm =
        Gemm { a, b, bias, out, dtype, accumulate, use_fast_accum: config.use_fast_accum, groups: None, tiling: None };
    gemm.launch(client, gemm_path_of_rows(client, Some(a.rows), [a.granularity, b.granularity], config))
}

/// Whether the operands fit each other, and their product an index.
fn check_operands(a: &Operand, b: &Operand) -> Result<(), KernelError> {
    check_pair(a, b)?;
    check_size(a.rows, b.rows, b.rows)
}

/// Whether the operands can be read, and contract over the same length.
fn check_pair(a: &Operand, b: &Operand) -> Result<(), KernelError> {
    a.check()?;
    b.check()?;
    if a.k == b.k { Ok(()) } else { Err(KernelError::ContractionMismatch { a: a.k, b: b.k }) }
}
