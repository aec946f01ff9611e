//! [`HighPrecisionGemm`]: a GEMM of a linear in high precision.
use burn_backend::tensor::FloatTensor;
use burn_backend::{Backend, DType, TensorMetadata};
use burn_std::Shape;
use float8_kernels::GEMV_ROWS;

use super::{DeviceFacts, in_dtype};
use crate::terms::Gemm;

/// A GEMM of a linear in high precision, for x `[.., K]`, w `[K, N]` and dy `[.., N]`.
#[derive(Clone, Debug)]
pub struct HighPrecisionGemm<T> {
    /// Which of the three.
    pub gemm: Gemm,
    /// x of fprop and wgrad, dy of dgrad.
    pub a: T,
    /// w of fprop and dgrad, dy of wgrad.
    pub b: T,
    /// `[N]`, only for fprop.
    pub bias: Option<T>,
    /// Dtype of the result.
    pub dtype: DType,
}

impl<T: TensorMetadata> HighPrecisionGemm<T> {
    /// Shape of the result.
    pub(super) fn shape(&self) -> Shape {
        let (a, b) = (self.a.shape(), self.b.shape());
        let with_last = |last: usize| {
            let mut dims = a.to_vec();
            *dims.last_mut().expect("the operand of a GEMM is no scalar") = last;
            Shape::from(dims)
        };
        match self.gemm {
            Gemm::Fprop => with_last(last(&b)),
            Gemm::Dgrad => with_last(b[0]),
            Gemm::Wgrad => Shape::from(vec![last(&a), last(&b)]),
        }
    }

    /// Name of the device's kernel for this GEMM, if the tensors are contiguous. None where Burn's
    /// operations compute it.
    pub(crate) fn kernel(&self, facts: impl FnOnce() -> DeviceFacts) -> Option<&'static str> {
        let name = match self.a.dtype() {
            DType::BF16 => "bf16 wgmma",
            DType::F16 => "f16 wgmma",
            _ => return None,
        };
        // TMA reads rows of whole 16 bytes.
        let is_whole = |t: &T| t.shape().num_elements() > 0 && last(&t.shape()).is_multiple_of(8);
        let shape = self.shape();
        let fits = self.a.dtype() == self.b.dtype() && is_whole(&self.a) && is_whole(&self.b);
        let is_large = fits && shape.num_elements() / last(&shape) > GEMV_ROWS;
        (is_large && facts().gemm.is_some_and(|gemm| gemm.has_half_gemm())).then_some(name)
    }
}

fn last(shape: &Shape) -> usize {
    shape[shape.num_dims() - 1]
}

/// The GEMM by Burn's operations.
pub(super) fn compute<B: Backend>(gemm: HighPrecisionGemm<FloatTensor<B>>) -> FloatTensor<B> {
    let HighPrecisionGemm { gemm, a, b, bias, dtype } = gemm;
    let y = match gemm {
        Gemm::Fprop => B::linear(a, b, bias),
        Gemm::Dgrad => B::linear_x_backward(b, a),
        Gemm::Wgrad => B::linear_weight_backward(a, b),
    };
    in_dtype::<B>(y, dtype)
}
