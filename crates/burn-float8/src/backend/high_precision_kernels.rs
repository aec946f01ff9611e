//! [`HighPrecisionGemm`] by the kernel of `float8-kernels` for 16-bit matrices.
use burn_backend::TensorMetadata;
use burn_cubecl::CubeRuntime;
use burn_cubecl::tensor::CubeTensor;
use cubecl::device::Device as _;
use float8_kernels::{HalfGemm, has_half_gemm};

use super::high_precision::HighPrecisionGemm;
use super::operand::tensor;
use super::self_check;
use super::views::{matrix_view, vector_view};
use crate::terms::Gemm;

/// The result of the kernel. None if the device has none, it is disabled, or cannot read these
/// tensors.
pub(super) fn compute<R: CubeRuntime>(gemm: &HighPrecisionGemm<CubeTensor<R>>) -> Option<CubeTensor<R>> {
    let HighPrecisionGemm { gemm: which, a, b, bias, dtype } = gemm;
    let (client, device) = (&a.client, &a.device);
    if !has_half_gemm(client) || [a, b].iter().any(|t| t.shape().num_elements() == 0) {
        return None;
    }
    let (a, b) = (matrix_view(a.clone()), matrix_view(b.clone()));
    let (a, b) = match which {
        Gemm::Fprop => (a, b),
        Gemm::Dgrad => (a, b.transposed()),
        Gemm::Wgrad => (a.transposed(), b),
    };
    let bias = bias.as_ref().map(vector_view);
    let product = HalfGemm { a: &a, b: &b, bias: bias.as_ref(), out: (*dtype).into() };
    let variant = self_check::of(client, device.to_id()).half_gemm(client, &product).ok()?;
    let y = product.run(client, &variant).ok()?;
    Some(tensor(client, device, y, gemm.shape(), *dtype))
}
