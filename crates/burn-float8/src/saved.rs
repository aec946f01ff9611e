//! [`linear`]: a linear whose backward state is the FP8 operand of x instead of x.
//!
//! Autodiff saves x for wgrad, in high precision, though wgrad reads only its FP8 copy. This operation casts xᵀ in forward,
//! saves that, and lets x go: 1 byte an element and the scales, where x itself takes 2 or 4. Gradients are those of
//! `nn::Linear`, bit for bit.
use std::sync::Arc;

use burn::tensor::{Tensor, TensorPrimitive};
use burn_autodiff::checkpoint::base::Checkpointer;
use burn_autodiff::checkpoint::strategy::CheckpointStrategy;
use burn_autodiff::grads::Gradients;
use burn_autodiff::ops::{Backward, Ops, OpsKind};
use burn_autodiff::{Autodiff, NodeId};
use burn_backend::tensor::FloatTensor;
use burn_backend::{DType, TensorMetadata};

use crate::backend::{Float8, Float8Backend, Float8Ops};
use crate::config::Float8LinearConfig;
use crate::copies::Fp8Copy;
use crate::layer::Layer;
use crate::linear::{self, Saving};
use crate::tensor::Float8Tensor;

/// y = x · w + b as [`nn::Linear`](burn::nn::Linear) computes it, keeping only the FP8 operand of x for backward.
///
/// `x: [.., K]`, `weight: [K, N]`, `bias: [N]`, y: `[.., N]`, for any rank from 1. y and the gradients equal those of
/// `nn::Linear` bit for bit. Memory falls only if nothing else keeps x: an activation that its own backward saves, too, such
/// as a norm's output that the norm does not need, is the case that gains. Where wgrad runs in high precision, x is saved as
/// it is. Without autodiff this is the plain linear.
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
pub fn linear<B: Float8Ops, const D: usize>(
    x: Tensor<B, D>,
    weight: Tensor<B, 2>,
    bias: Option<Tensor<B, 1>>,
) -> Tensor<B, D> {
    let bias = bias.map(|bias| bias.into_primitive().tensor());
    let y = B::linear_saved(x.into_primitive().tensor(), weight.into_primitive().tensor(), bias);
    Tensor::from_primitive(TensorPrimitive::Float(y))
}

/// What wgrad needs of x.
#[derive(Clone, Debug)]
enum SavedInput<B: Float8Backend> {
    Float8 { copy: Arc<Fp8Copy<B>>, layer: Arc<Layer>, config: Float8LinearConfig },
    Full(Float8Tensor<B>),
}

/// What backward needs.
#[derive(Clone, Debug)]
struct State<B: Float8Backend> {
    /// For wgrad.
    x: Option<SavedInput<B>>,
    /// For dgrad.
    weight: Option<Float8Tensor<B>>,
    weight_dtype: DType,
    bias_dtype: Option<DType>,
}

/// The gradients of x, w and b; the last parent is absent without a bias.
fn backward<B: Float8Backend>(
    state: State<B>,
    dy: Float8Tensor<B>,
    [x, weight, bias]: [Option<NodeId>; 3],
    grads: &mut Gradients,
) {
    if let Some(id) = x {
        let weight = state.weight.expect("saved if x is tracked");
        grads.register::<Float8<B>>(id, linear::dgrad(weight, dy.clone()));
    }
    if let Some(id) = weight {
        let dw = match state.x.expect("saved if the weight is tracked") {
            SavedInput::Full(x) => linear::wgrad(x, dy.clone()),
            SavedInput::Float8 { copy, layer, config } => {
                linear::wgrad_saved(&copy, &dy, &layer, &config, state.weight_dtype)
            }
        };
        grads.register::<Float8<B>>(id, dw);
    }
    if let Some(id) = bias {
        let dtype = state.bias_dtype.unwrap_or(dy.dtype());
        grads.register::<Float8<B>>(id, linear::bias_grad_as(dy, dtype));
    }
}

#[derive(Debug)]
struct WithBias;
#[derive(Debug)]
struct NoBias;

impl<B: Float8Backend> Backward<Float8<B>, 3> for WithBias {
    type State = State<B>;

    fn backward(self, ops: Ops<Self::State, 3>, grads: &mut Gradients, _: &mut Checkpointer) {
        let dy = grads.consume::<Float8<B>>(&ops.node);
        backward(ops.state, dy, ops.parents.map(|node| node.map(|node| node.id)), grads);
    }
}

impl<B: Float8Backend> Backward<Float8<B>, 2> for NoBias {
    type State = State<B>;

    fn backward(self, ops: Ops<Self::State, 2>, grads: &mut Gradients, _: &mut Checkpointer) {
        let dy = grads.consume::<Float8<B>>(&ops.node);
        let [x, weight] = ops.parents;
        backward(ops.state, dy, [x.map(|node| node.id), weight.map(|node| node.id), None], grads);
    }
}

/// See [`linear`](linear()).
pub(crate) fn linear_autodiff<B: Float8Backend, C: CheckpointStrategy>(
    x: FloatTensor<Autodiff<Float8<B>, C>>,
    weight: FloatTensor<Autodiff<Float8<B>, C>>,
    bias: Option<FloatTensor<Autodiff<Float8<B>, C>>>,
) -> FloatTensor<Autodiff<Float8<B>, C>> {
    let run = || {
        let bias = bias.as_ref().map(|bias| bias.primitive.clone());
        linear::forward(x.primitive.clone(), weight.primitive.clone(), bias)
    };
    let state = || State {
        x: weight.is_tracked().then(|| match linear::save_input(&x.primitive, &weight.primitive) {
            Some(Saving { copy, layer, config }) => SavedInput::Float8 { copy, layer, config },
            None => SavedInput::Full(x.primitive.clone()),
        }),
        weight: x.is_tracked().then(|| weight.primitive.clone()),
        weight_dtype: weight.dtype(),
        bias_dtype: bias.as_ref().map(|bias| bias.dtype()),
    };
    // Forward first: it checks the shapes, and what it finds of the amax serves the copy that is saved.
    macro_rules! record {
        ($op:expr, $nodes:expr) => {
            match $op.prepare::<C>($nodes).compute_bound().stateful() {
                OpsKind::Tracked(prep) => {
                    let y = run();
                    prep.finish(state(), y)
                }
                OpsKind::UnTracked(prep) => prep.finish(run()),
            }
        };
    }
    let (x_node, weight_node) = (x.node.clone(), weight.node.clone());
    match &bias {
        Some(bias) => record!(WithBias, [x_node, weight_node, bias.node.clone()]),
        None => record!(NoBias, [x_node, weight_node]),
    }
}
