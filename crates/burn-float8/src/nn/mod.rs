//! What a model calls by name, on any backend: [`linear`], [`grouped_linear`] and [`full_tensor`].
mod grouped;

use burn::tensor::backend::Backend;
use burn::tensor::{Tensor, TensorPrimitive, module};

use crate::ops::functions::find;
pub use grouped::{GroupedLinear, grouped_linear};

/// y = x · w + b as [`nn::Linear`](burn::nn::Linear) computes it, keeping only the FP8 operand of x for backward.
///
/// `x: [.., K]`, `weight: [K, N]`, `bias: [N]`, y: `[.., N]`, for any rank from 1. y and the gradients equal those of
/// `nn::Linear` bit for bit. Memory falls only if nothing else keeps x: an activation that its own backward saves, too, such
/// as a norm's output that the norm does not need, is the case that gains. Where wgrad runs in high precision, x is saved as
/// it is. Backward runs as forward did: to switch FP8 off between the two changes nothing.
///
/// On any backend: on one without a [`Float8`](crate::Float8), or without autodiff, this is `nn::Linear`. Under a checkpointing
/// strategy other than Burn's two, too, until a configuration is applied to a model.
///
/// ```
/// # #[cfg(feature = "flex")] {
/// use burn::backend::{Autodiff, Flex};
/// use burn::tensor::Tensor;
/// type B = Autodiff<burn_float8::Float8<Flex>>;
///
/// let device = Default::default();
/// let (x, w) = (Tensor::<B, 2>::ones([8, 32], &device), Tensor::<B, 2>::ones([32, 16], &device).require_grad());
/// let y = burn_float8::linear(x, w.clone(), None);
/// assert_eq!(w.grad(&y.sum().backward()).unwrap().dims(), [32, 16]);
/// # }
/// ```
///
/// # Panics
///
/// As `nn::Linear`, if the shapes do not fit.
pub fn linear<B: Backend, const D: usize>(
    x: Tensor<B, D>,
    weight: Tensor<B, 2>,
    bias: Option<Tensor<B, 1>>,
) -> Tensor<B, D> {
    if D == 1 {
        // A row.
        return linear(x.unsqueeze::<2>(), weight, bias).squeeze_dim(0);
    }
    let Some(functions) = find::<B>() else { return module::linear(x, weight, bias) };
    let bias = bias.map(|bias| bias.into_primitive().tensor());
    let y = (functions.linear)(x.into_primitive().tensor(), weight.into_primitive().tensor(), bias);
    Tensor::from_primitive(TensorPrimitive::Float(y))
}

/// The whole of a weight `[K, N]` that [`Sharded::apply`](crate::Sharded::apply) has divided between ranks (PyTorch's
/// `DTensor.full_tensor`); any other tensor, and on any other backend, is returned as it is.
///
/// `nn::Linear` and `nn::Embedding` need none of it. It is for what else reads a weight, such as an output layer that shares the
/// embedding's table:
///
/// ```
/// use burn::nn::Embedding;
/// use burn::tensor::Tensor;
/// use burn::tensor::backend::Backend;
///
/// /// x `[M, H]` → `[M, V]`
/// fn tied_output<B: Backend>(embedding: &Embedding<B>, x: Tensor<B, 2>) -> Tensor<B, 2> {
///     x.matmul(burn_float8::full_tensor(embedding.weight.val()).transpose())
/// }
/// ```
///
/// Ranks exchange the weight, in the dtype of `weight`, and in backward its gradient, of which each gets the sum of its rows: all of
/// them call it, in the same order. The whole lives as long as what reads it. `weight` is the parameter, or what an element-wise
/// operation or a cast has made of it; a transpose is taken of the whole.
///
/// # Panics
///
/// [`Float8Error::NotRows`](crate::Float8Error::NotRows), in words, if `weight` has not the shape of the shard; if a rank is lost.
pub fn full_tensor<B: Backend>(weight: Tensor<B, 2>) -> Tensor<B, 2> {
    match find::<B>() {
        Some(functions) => {
            let whole = (functions.full_tensor)(weight.into_primitive().tensor());
            Tensor::from_primitive(TensorPrimitive::Float(whole))
        }
        None => weight,
    }
}
