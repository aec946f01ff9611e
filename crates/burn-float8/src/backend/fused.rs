//! [`Fused`]: operations of a transformer, forward and backward. Each is one pass where the backend
//! has a kernel, and Burn's operations elsewhere.
//!
//! ```text
//! SwiGLU           y = a s b,  s = σ(a)       da = dy b s (1 + a (1 - s)),  db = dy a s
//! RMSNorm          y = (x r) γ,               r = 1 / √(mean x² + ε)
//!                  dx = r (g - n mean(g n)),  g = dy γ,  n = x r,  dγ = Σ_rows dy n
//! rotary           y₁ = x₁ c - x₂ s,  y₂ = x₂ c + x₁ s       dx₁ = dy₁ c + dy₂ s,  dx₂ = dy₂ c - dy₁ s
//! log-likelihood   y = l_t - ln Σ exp l                      dl = dy (onehot(t) - softmax(l))
//! attention        see the module `attention`
//! ```
//! All are computed in f32, for any input and output dtype.

use burn::tensor::activation::{sigmoid, silu};
use burn::tensor::{IndexingUpdateOp, Int, Tensor, TensorPrimitive};
use burn_backend::tensor::{BoolTensor, FloatTensor, IntTensor};
use burn_backend::{Backend, DType, TensorMetadata};

use super::attention::{self, Attention};

/// A fused operation, with its inputs that get no gradient.
#[derive(Clone, Debug)]
pub enum Fused<B: Backend> {
    /// `silu(a) · b` of two tensors of the same shape.
    SwiGlu,
    /// RMSNorm of x `[.., H]` with γ `[H]`, in x's dtype.
    RmsNorm {
        /// Added to the mean of squares.
        epsilon: f64,
    },
    /// Rotary embedding: rotates the halves of each head of x `[B, T, heads, d]` by the angle of
    /// its position, with tables of cosines and sines, f32, `[T, d/2]`. y is `[B, heads, T, d]`. The
    /// tables get no gradient.
    Rotary,
    /// Log-probability of each target, `[M, 1]`, from logits `[M, V]`.
    LogLikelihood {
        /// `[M]`, in `0..V`.
        targets: IntTensor<B>,
    },
    /// Scaled dot-product attention in high precision: q `[B, H, T, d]`, k `[B, KV, S, d]`, v
    /// `[B, KV, S, e]`, y `[B, H, T, e]`. Each of the KV heads serves `H / KV` consecutive query
    /// heads. y is 0 for a query that sees no key.
    Attention(Attention<B>),
}

/// Inputs of a backward in addition to the inputs of its forward.
#[derive(Debug)]
pub struct FusedBackward<'a, B: Backend> {
    /// All outputs of forward, y first, if there are several. Otherwise empty.
    pub outputs: &'a [FloatTensor<B>],
    /// Gradient of y.
    pub dy: &'a FloatTensor<B>,
}

impl<B: Backend> Fused<B> {
    /// Names of forward and backward in a profile.
    pub(crate) fn names(&self) -> [&'static str; 2] {
        match self {
            Self::SwiGlu => ["swiglu", "swiglu_backward"],
            Self::RmsNorm { .. } => ["rms_norm", "rms_norm_backward"],
            Self::Rotary => ["rotary", "rotary_backward"],
            Self::LogLikelihood { .. } => ["log_likelihood", "log_likelihood_backward"],
            Self::Attention(_) => ["attention", "attention_backward"],
        }
    }

    /// The same operation on a backend with the same int and bool tensors.
    pub(crate) fn map<C>(self, float: impl Fn(FloatTensor<B>) -> FloatTensor<C>) -> Fused<C>
    where
        C: Backend<IntTensorPrimitive = IntTensor<B>, BoolTensorPrimitive = BoolTensor<B>>,
    {
        match self {
            Self::SwiGlu => Fused::SwiGlu,
            Self::RmsNorm { epsilon } => Fused::RmsNorm { epsilon },
            Self::Rotary => Fused::Rotary,
            Self::LogLikelihood { targets } => Fused::LogLikelihood { targets },
            Self::Attention(Attention { mask, bias, documents, options }) => {
                Fused::Attention(Attention { mask, bias: bias.map(float), documents, options })
            }
        }
    }
}

fn f32<B: Backend, const D: usize>(tensor: &FloatTensor<B>) -> Tensor<B, D> {
    Tensor::<B, D>::from_primitive(TensorPrimitive::Float(tensor.clone())).cast(DType::F32)
}

fn flat<B: Backend>(tensor: &FloatTensor<B>) -> Tensor<B, 1> {
    f32::<B, 1>(&B::float_reshape(tensor.clone(), [tensor.shape().num_elements()].into()))
}

/// Reshapes to rows of the length of γ.
fn rows<B: Backend>(tensor: &FloatTensor<B>, gamma: &FloatTensor<B>) -> Tensor<B, 2> {
    let (elements, width) = (tensor.shape().num_elements(), gamma.shape()[0]);
    f32::<B, 2>(&B::float_reshape(tensor.clone(), [elements / width, width].into()))
}

/// Casts and reshapes to the dtype and shape of `other`.
fn like<B: Backend, const D: usize>(tensor: Tensor<B, D>, other: &FloatTensor<B>) -> FloatTensor<B> {
    let tensor = tensor.cast(other.dtype()).into_primitive().tensor();
    B::float_reshape(tensor, other.shape())
}

/// `1 / √(mean x² + ε)` of each row.
fn inverse_rms<B: Backend>(x: &Tensor<B, 2>, epsilon: f64) -> Tensor<B, 2> {
    (x.clone().square().mean_dim(1) + epsilon).sqrt().recip()
}

/// Logits minus their row maximum, and the logarithm of the sum of their exponentials.
fn shifted<B: Backend>(logits: &FloatTensor<B>) -> (Tensor<B, 2>, Tensor<B, 2>) {
    let logits = f32::<B, 2>(logits);
    let shifted = logits.clone() - logits.max_dim(1);
    let log_sum = shifted.clone().exp().sum_dim(1).log();
    (shifted, log_sum)
}

fn column<B: Backend>(targets: &IntTensor<B>) -> Tensor<B, 2, Int> {
    Tensor::<B, 1, Int>::from_primitive(targets.clone()).unsqueeze_dim(1)
}

/// Rotates the halves of `[B, T, heads, d]`. `back` inverts the rotation.
fn rotated<B: Backend>(x: Tensor<B, 4>, [cos, sin]: [&FloatTensor<B>; 2], back: bool) -> Tensor<B, 4> {
    let half = x.dims()[3] / 2;
    let [cos, sin] = [cos, sin].map(|table| f32::<B, 2>(table).unsqueeze_dims::<4>(&[0, 2]));
    let sin = if back { sin.neg() } else { sin };
    let (first, second) = (x.clone().slice_dim(3, 0..half), x.slice_dim(3, half..2 * half));
    let y1 = first.clone() * cos.clone() - second.clone() * sin.clone();
    let y2 = second * cos + first * sin;
    Tensor::cat(vec![y1, y2], 3)
}

/// Outputs by Burn's operations, or with `backward` the gradients of the inputs.
pub(super) fn compute<B: Backend>(
    op: &Fused<B>,
    inputs: &[FloatTensor<B>],
    backward: Option<&FusedBackward<'_, B>>,
) -> Vec<FloatTensor<B>> {
    match backward {
        None => vec![forward(op, inputs)],
        Some(FusedBackward { dy, .. }) => gradients(op, inputs, dy),
    }
}

fn forward<B: Backend>(op: &Fused<B>, inputs: &[FloatTensor<B>]) -> FloatTensor<B> {
    match (op, inputs) {
        (Fused::SwiGlu, [a, b]) => like(silu(flat::<B>(a)) * flat::<B>(b), a),
        (Fused::RmsNorm { epsilon }, [x, gamma]) => {
            let values = rows::<B>(x, gamma);
            let inverse_rms = inverse_rms(&values, *epsilon);
            like(values * inverse_rms * f32::<B, 1>(gamma).unsqueeze(), x)
        }
        (Fused::Rotary, [x, cos, sin]) => {
            let y = rotated(f32::<B, 4>(x), [cos, sin], false).cast(x.dtype());
            y.swap_dims(1, 2).into_primitive().tensor()
        }
        (Fused::LogLikelihood { targets }, [logits]) => {
            let (shifted, log_sum) = shifted::<B>(logits);
            let likelihood = shifted.gather(1, column::<B>(targets)) - log_sum;
            likelihood.cast(logits.dtype()).into_primitive().tensor()
        }
        (Fused::Attention(attention), [q, k, v]) => attention::forward(attention, [q, k, v]),
        _ => unreachable!("{} of {} inputs", op.names()[0], inputs.len()),
    }
}

fn gradients<B: Backend>(op: &Fused<B>, inputs: &[FloatTensor<B>], dy: &FloatTensor<B>) -> Vec<FloatTensor<B>> {
    match (op, inputs) {
        (Fused::SwiGlu, [a, b]) => {
            let (gate, up, dy) = (flat::<B>(a), flat::<B>(b), flat::<B>(dy));
            let s = sigmoid(gate.clone());
            let slope = (gate.clone() * (s.clone().neg() + 1.0) + 1.0) * s.clone();
            vec![like(dy.clone() * up * slope, a), like(dy * gate * s, b)]
        }
        (Fused::RmsNorm { epsilon }, [x, gamma]) => {
            let (values, dy) = (rows::<B>(x, gamma), rows::<B>(dy, gamma));
            let inverse_rms = inverse_rms(&values, *epsilon);
            let normed = values * inverse_rms.clone();
            let g = dy.clone() * f32::<B, 1>(gamma).unsqueeze();
            let mean = (g.clone() * normed.clone()).mean_dim(1);
            let dx = (g - normed.clone() * mean) * inverse_rms;
            vec![like(dx, x), like((dy * normed).sum_dim(0), gamma)]
        }
        (Fused::Rotary, [x, cos, sin]) => {
            let dy = f32::<B, 4>(dy).swap_dims(1, 2);
            vec![like(rotated(dy, [cos, sin], true), x)]
        }
        (Fused::LogLikelihood { targets }, [logits]) => {
            let (shifted, log_sum) = shifted::<B>(logits);
            let dy = f32::<B, 2>(dy);
            let softmax = (shifted - log_sum).exp();
            let dl = (softmax * dy.clone().neg()).scatter(1, column::<B>(targets), dy, IndexingUpdateOp::Add);
            vec![like(dl, logits)]
        }
        (Fused::Attention(attention), [q, k, v]) => attention::backward(attention, [q, k, v], dy).into(),
        _ => unreachable!("{} of {} inputs", op.names()[1], inputs.len()),
    }
}
