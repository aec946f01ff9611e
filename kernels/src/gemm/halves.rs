//! Products of bf16 or f16 matrices by the [`hopper`] kernel, in either order of their elements: no
//! operand is transposed first. Accumulators are f32.

use core::fmt;

use cubecl::ir::StorageType;
use cubecl::prelude::*;
use cubecl::server::Handle;

use super::tma::maps::{Matrix, sms};
use super::tma::plan::GemmPlan;
use super::variant::{JUDGED_SPLITS, judged_product};
use super::{GEMV_ROWS, Gemm, GemmDevice, GemmPath, GemmShape, hopper};
use crate::arch::{CudaArch, cuda_arch};
use crate::denylist::{Disabled, device_key, disable};
use crate::element_type::ElementType;
use crate::operand::check_size;
use crate::ptx::cvt::Isa;
use crate::ptx::wgmma::{Element, Major};
use crate::view::{Checked, check_aligned};
use crate::{Format, Granularity, KernelError, MatrixView, Operand, VectorView, supports};

/// Key of the kernel in the list of disabled ones.
#[derive(Hash)]
struct HalfGemmKernel;

impl GemmDevice {
    /// Whether the device has a kernel for [`HalfGemm`] that is not disabled.
    pub fn has_half_gemm(&self) -> bool {
        is_available(self.arch, &self.disabled())
    }
}

fn is_available(arch: Option<CudaArch>, disabled: &Disabled) -> bool {
    arch == Some(CudaArch::Sm90) && !disabled.contains(HalfGemmKernel)
}

/// Whether the device has a kernel for [`HalfGemm`] that is not disabled.
pub fn has_half_gemm<R: Runtime>(client: &ComputeClient<R>) -> bool {
    is_available(cuda_arch(client), &Disabled::on(device_key(client)))
}

/// Disables [`HalfGemm`] on this device.
pub fn disable_half_gemm<R: Runtime>(client: &ComputeClient<R>) {
    disable(client, HalfGemmKernel);
}

/// `out [M, N] = A [M, K] · B [K, N] + bias [N]` of bf16 or f16 matrices, contiguous, in the dtype
/// `out`. Runs on Hopper.
///
/// Products are exact and sums are f32 ([`GemmPath::Bf16Wgmma`]). The bias is added to the sum, and
/// the result is rounded once. One axis of each matrix is contiguous, and the other's stride is a
/// multiple of 8 elements, as TMA requires. So xᵀ · dy needs no transposed copy of x.
#[derive(Clone, Copy, Debug)]
pub struct HalfGemm<'a> {
    /// `[M, K]`, bf16 or f16.
    pub a: &'a MatrixView,
    /// `[K, N]`, in the dtype of A.
    pub b: &'a MatrixView,
    /// `[N]`, f32, f16 or bf16.
    pub bias: Option<&'a VectorView>,
    /// f32, f16 or bf16.
    pub out: StorageType,
}

/// Compile-time parameters of a [`HalfGemm`] that do not follow from its tile.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct HalfGemmProblem {
    /// M, N and K.
    pub product: [usize; 3],
    /// Whether the rows of A, and of B, are contiguous.
    pub row_major: [bool; 2],
    /// Dtype of A and B.
    pub dtype: StorageType,
    /// Dtype of the bias.
    pub bias: Option<StorageType>,
    /// Dtype of the output.
    pub out: StorageType,
}

/// Compile-time parameters of a [`HalfGemm`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct HalfGemmVariant {
    /// Small product that compiles to the same kernels.
    pub small: HalfGemmProblem,
    plan: GemmPlan,
}

impl HalfGemmVariant {
    /// Variant that self-checks run for this one: the same kernels, with at most two splits of the
    /// contraction.
    pub fn judged(self) -> Self {
        Self { plan: GemmPlan { splits: self.plan.splits.min(JUDGED_SPLITS), ..self.plan }, ..self }
    }
}

impl fmt::Display for HalfGemmVariant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let HalfGemmProblem { product: [m, n, k], row_major, dtype, bias, out } = self.small;
        let [a, b] = row_major.map(|by_rows| if by_rows { "" } else { "ᵀ" });
        write!(f, "[{m}, {k}]{a} · [{k}, {n}]{b}, {dtype} to {out}")?;
        bias.iter().try_for_each(|bias| write!(f, ", {bias} bias"))
    }
}

/// Matrices of a [`HalfGemm`] that TMA reads.
#[derive(Debug)]
pub(super) struct Halves {
    pub(super) matrices: [Matrix; 2],
    pub(super) element: Element,
}

/// Rows `[rows, k]` of an operand, as TMA reads them.
fn matrix<R: Runtime>(client: &ComputeClient<R>, view: &MatrixView) -> Result<(Matrix, Major), KernelError> {
    Checked::new(client, view)?;
    let ([rows, k], [of_row, of_k]) = (view.shape, view.strides);
    let (major, [lines, len], apart) = match (of_row, of_k) {
        (_, 1) => (Major::K, [rows, k], of_row),
        (1, _) => (Major::Mn, [k, rows], of_k),
        _ => return Err(KernelError::NotContiguous { shape: view.shape, strides: view.strides }),
    };
    // The distance of a single line is never used.
    let apart = if lines == 1 { len.next_multiple_of(8) } else { apart };
    if apart < len || !apart.is_multiple_of(8) {
        return Err(KernelError::NotContiguous { shape: view.shape, strides: view.strides });
    }
    check_aligned(&view.handle, 16)?;
    Ok((Matrix { handle: view.handle.clone(), rows: lines, width: 2 * len, pitch: 2 * apart }, major))
}

impl HalfGemm<'_> {
    /// Checks the matrices.
    fn halves<R: Runtime>(&self, client: &ComputeClient<R>) -> Result<Halves, KernelError> {
        let &Self { a, b, bias, out } = self;
        let ([m, k], [k_of_b, n]) = (a.shape, b.shape);
        if k != k_of_b {
            return Err(KernelError::ContractionMismatch { a: k, b: k_of_b });
        }
        let bf16 = match ElementType::of(a.dtype)? {
            ElementType::F32 => return Err(KernelError::UnsupportedDtype { dtype: a.dtype }),
            element => element == ElementType::Bf16,
        };
        for (dtype, is_fit) in [(b.dtype, a.dtype == b.dtype), (out, supports(client, out))] {
            if !is_fit {
                return Err(KernelError::UnsupportedDtype { dtype });
            }
        }
        if let Some(bias) = bias.filter(|bias| bias.len != n) {
            return Err(KernelError::BiasMismatch { bias: bias.len, n });
        }
        check_size(m, n, n)?;
        let ((a, of_a), (b, of_b)) = (matrix(client, a)?, matrix(client, &b.clone().transposed())?);
        Ok(Halves { matrices: [a, b], element: Element::Half { bf16, majors: [of_a, of_b] } })
    }

    /// Compile-time parameters of the kernel. Few rows are left to GEMV kernels.
    ///
    /// # Errors
    /// The errors of [`run`](Self::run).
    pub fn variant<R: Runtime>(&self, client: &ComputeClient<R>) -> Result<HalfGemmVariant, KernelError> {
        let halves = self.halves(client)?;
        let shape = self.shape();
        let [rows, ..] = shape.product;
        if rows <= GEMV_ROWS || !has_half_gemm(client) {
            return Err(KernelError::Disabled);
        }
        let plan = hopper::plan(&shape, sms(client));
        let product = judged_product(GemmPath::Bf16Wgmma, &plan, &shape);
        let [of_a, of_b] = [0, 1].map(|side| halves.element.major(side));
        let row_major = [of_a == Major::K, of_b == Major::Mn];
        let bias = self.bias.map(|bias| bias.dtype);
        let small = HalfGemmProblem { product, row_major, dtype: self.a.dtype, bias, out: self.out };
        Ok(HalfGemmVariant { small, plan })
    }

    /// Shape of the same GEMM of codes with E8M0 scales, whose products are bf16 too.
    fn shape(&self) -> GemmShape {
        GemmShape {
            product: [self.a.shape[0], self.b.shape[1], self.a.shape[1]],
            granularities: [Granularity::Block1x32; 2],
            power_of_two: true,
            use_fast_accum: false,
            groups: None,
        }
    }

    /// Runs the GEMM into new memory, with the [`variant`](Self::variant) of these matrices.
    ///
    /// # Errors
    /// [`KernelError::EmptyMatrix`] for a zero M, N or K,
    /// [`ContractionMismatch`](KernelError::ContractionMismatch),
    /// [`BiasMismatch`](KernelError::BiasMismatch),
    /// [`UnsupportedDtype`](KernelError::UnsupportedDtype), [`OutOfBounds`](KernelError::OutOfBounds),
    /// [`Misaligned`](KernelError::Misaligned) for memory that does not start at 16 bytes,
    /// [`NotContiguous`](KernelError::NotContiguous) for other strides than the ones above,
    /// [`TooLarge`](KernelError::TooLarge), [`Disabled`](KernelError::Disabled) on other devices, for
    /// at most [`GEMV_ROWS`] rows, and after [`disable_half_gemm`].
    pub fn run<R: Runtime>(&self, client: &ComputeClient<R>, variant: &HalfGemmVariant) -> Result<Handle, KernelError> {
        let halves = self.halves(client)?;
        let out_type = ElementType::of(self.out)?;
        let bias = self.bias.map(|bias| Checked::vector(client, bias)).transpose()?;
        let GemmShape { product: [m, n, k], granularities: [granularity, _], .. } = self.shape();
        let operand = |view: &MatrixView, rows| Operand {
            codes: view.handle.clone(),
            // Kernels with such scales never read them from here.
            inv_scale: view.handle.clone(),
            rows,
            k,
            format: Format::E4m3,
            granularity,
            power_of_two: true,
        };
        let handle = client.empty(m * n * out_type.size());
        let gemm = Gemm {
            a: &operand(self.a, m),
            b: &operand(self.b, n),
            bias,
            out: &handle,
            dtype: out_type.storage(),
            use_fast_accum: false,
            groups: None,
            plan: variant.plan,
            isa: Isa::Portable,
            halves: Some(&halves),
        };
        hopper::launch(client, &gemm);
        Ok(handle)
    }
}
