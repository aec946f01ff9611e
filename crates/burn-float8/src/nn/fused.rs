//! SwiGLU, RMSNorm, rotary embedding and log-likelihood. Each is one autodiff node that keeps only
//! its inputs.
use burn::tensor::activation::{log_softmax, silu};
use burn::tensor::backend::Backend;
use burn::tensor::{DType, Int, Tensor, TensorPrimitive};
use burn_backend::tensor::FloatTensor;

use crate::backend::Fused;
use crate::ops::functions::{Functions, find};

/// Functions of a backend with nodes, if they can compute this tensor.
fn functions<B: Backend, const D: usize>(x: &Tensor<B, D>) -> Option<&'static Functions<B>> {
    find::<B>().filter(|_| x.dtype() != DType::F64 && x.shape().num_elements() > 0)
}

fn primitive<B: Backend, const D: usize>(x: Tensor<B, D>) -> FloatTensor<B> {
    x.into_primitive().tensor()
}

fn node<B: Backend, const D: usize>(
    functions: &Functions<B>,
    op: Fused<B>,
    inputs: Vec<FloatTensor<B>>,
) -> Tensor<B, D> {
    Tensor::from_primitive(TensorPrimitive::Float((functions.fused)(op, inputs)))
}

/// `silu(a) · b` of two tensors of the same shape, with f32 intermediates
/// ([Shazeer, 2020](https://arxiv.org/abs/2002.05202)).
///
/// # Panics
///
/// If the shapes differ (panic of Burn's product).
pub fn swiglu<B: Backend, const D: usize>(a: Tensor<B, D>, b: Tensor<B, D>) -> Tensor<B, D> {
    match functions(&a) {
        Some(functions) if a.dims() == b.dims() && a.dtype() == b.dtype() => {
            node(functions, Fused::SwiGlu, vec![primitive(a), primitive(b)])
        }
        _ => silu(a) * b,
    }
}

/// `x · (1 / √(mean x² + ε)) · γ` over the last dimension. Computes in f32; the result has the
/// dtype of x ([Zhang and Sennrich, 2019](https://arxiv.org/abs/1910.07467)).
///
/// The order of operations follows transformers, which multiplies by the inverse root. Burn's
/// `RmsNorm` divides by the root.
///
/// # Panics
///
/// If γ does not match the last dimension (panic of Burn's product).
pub fn rms_norm<B: Backend, const D: usize>(x: Tensor<B, D>, gamma: Tensor<B, 1>, epsilon: f64) -> Tensor<B, D> {
    let dtype = x.dtype();
    match functions(&x) {
        Some(functions) if gamma.dims() == [x.dims()[D - 1]] && gamma.dtype() != DType::F64 => {
            node(functions, Fused::RmsNorm { epsilon }, vec![primitive(x), primitive(gamma)])
        }
        _ => {
            let x = x.cast(DType::F32);
            let inverse_rms = (x.clone().square().mean_dim(D - 1) + epsilon).sqrt().recip();
            (x * inverse_rms * gamma.cast(DType::F32).unsqueeze()).cast(dtype)
        }
    }
}

/// Rotary embedding: rotates the halves of each head of x `[B, T, heads, d]` by the angle of its
/// position. `cos` and `sin` are f32 `[T, d/2]`. Returns `[B, heads, T, d]`.
///
/// ```text
/// y₁ = x₁ cos - x₂ sin        y₂ = x₂ cos + x₁ sin
/// ```
/// Computed in f32; the result has the dtype of x. The tables get no gradient. Source:
/// [Su et al., 2021](https://arxiv.org/abs/2104.09864), with halves instead of pairs as in Llama.
///
/// # Panics
///
/// If the tables do not match x (panic of Burn's product).
pub fn rotary<B: Backend>(x: Tensor<B, 4>, cos: Tensor<B, 2>, sin: Tensor<B, 2>) -> Tensor<B, 4> {
    let ([_, len, _, dim], dtype) = (x.dims(), x.dtype());
    match functions(&x) {
        Some(functions) if [cos.dims(), sin.dims()] == [[len, dim / 2]; 2] && dim.is_multiple_of(2) => {
            node(functions, Fused::Rotary, vec![primitive(x), primitive(cos.detach()), primitive(sin.detach())])
        }
        _ => {
            let x = x.cast(DType::F32).swap_dims(1, 2);
            let (first, second) = (x.clone().slice_dim(3, 0..dim / 2), x.slice_dim(3, dim / 2..dim));
            let [cos, sin] = [cos, sin].map(|table| table.unsqueeze::<4>());
            let y1 = first.clone() * cos.clone() - second.clone() * sin.clone();
            Tensor::cat(vec![y1, second * cos + first * sin], 3).cast(dtype)
        }
    }
}

/// `ln softmax(logits)[target]` of each row: f32 logits `[M, V]`, targets `[M]` in `0..V`, result
/// `[M, 1]`. Backward recomputes the softmax. With a large vocabulary, only logits and their
/// gradient take memory of that size.
///
/// # Panics
///
/// If the numbers of targets and rows differ, or a target is out of range (panic of Burn's
/// `gather`).
pub fn log_likelihood<B: Backend>(logits: Tensor<B, 2>, targets: Tensor<B, 1, Int>) -> Tensor<B, 2> {
    match functions(&logits) {
        Some(functions) if targets.dims() == [logits.dims()[0]] => {
            let targets = targets.into_primitive();
            node(functions, Fused::LogLikelihood { targets }, vec![primitive(logits)])
        }
        _ => log_softmax(logits, 1).gather(1, targets.unsqueeze_dim(1)),
    }
}
