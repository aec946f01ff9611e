//! Linears that a model calls by name: [`linear`] and [`grouped_linear`], on any backend.
mod functions;
mod grouped;

use burn::tensor::backend::Backend;
use burn::tensor::{Tensor, TensorPrimitive, module};

use functions::find;
pub(crate) use functions::register;
pub use grouped::{GroupedLinear, grouped_linear};

/// y = x · w + b as [`nn::Linear`](burn::nn::Linear) computes it, keeping only the FP8 operand of x for backward.
///
/// `x: [.., K]`, `weight: [K, N]`, `bias: [N]`, y: `[.., N]`, for any rank from 1. y and the gradients equal those of
/// `nn::Linear` bit for bit. Memory falls only if nothing else keeps x: an activation that its own backward saves, too, such
/// as a norm's output that the norm does not need, is the case that gains. Where wgrad runs in high precision, x is saved as
/// it is.
///
/// On any backend: which of them wrap a [`Float8`](crate::Float8) is known once [`Float8Config::apply`](crate::Float8Config::apply)
/// has seen a model on them. On others, without autodiff, and before any `apply`, this is `nn::Linear`.
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
    let Some(functions) = find::<B>() else { return module::linear(x, weight, bias) };
    let bias = bias.map(|bias| bias.into_primitive().tensor());
    let y = (functions.linear)(x.into_primitive().tensor(), weight.into_primitive().tensor(), bias);
    Tensor::from_primitive(TensorPrimitive::Float(y))
}
