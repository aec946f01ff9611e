//! A linear whose backward state is the FP8 operand of x instead of x.
//!
//! Autodiff saves x for wgrad, in high precision, though wgrad reads only its FP8 copy. This operation casts xᵀ in forward,
//! saves that, and lets x go: 1 byte an element and the scales, where x itself takes 2 or 4. Gradients are those of
//! `nn::Linear`, bit for bit.
use std::sync::Arc;

use burn_autodiff::checkpoint::base::Checkpointer;
use burn_autodiff::checkpoint::strategy::CheckpointStrategy;
use burn_autodiff::grads::Gradients;
use burn_autodiff::ops::{Backward, Ops, OpsKind};
use burn_autodiff::{Autodiff, NodeId};
use burn_backend::tensor::FloatTensor;
use burn_backend::{DType, TensorMetadata};
use burn_std::Shape;

use super::Float8;
use super::call::{GemmCall, Owner};
use super::linear::{self, enter_wgrad, last, reduced, rows, sample_operands};
use crate::backend::Float8Backend;
use crate::config::Float8LinearConfig;
use crate::step::{DeviceState, Observation, Sample};
use crate::tensor::{
    CastRequest, Float8Tensor, Fp8Copy, LinearUse, View, fp8_copy, observation, push_sample, take_sample,
};
use crate::terms::{Gemm, Operand};

/// What wgrad needs of x.
#[derive(Clone, Debug)]
enum SavedInput<B: Float8Backend> {
    Float8(Saved<B>),
    Full(Owner, Float8Tensor<B>),
}

/// The FP8 operand of x that wgrad reads, and what counts once backward follows.
#[derive(Clone)]
struct Saved<B: Float8Backend> {
    copy: Arc<Fp8Copy<B>>,
    owner: Owner,
    config: Float8LinearConfig,
    observations: Vec<Arc<Observation<B>>>,
    samples: Vec<Sample<B>>,
}

impl<B: Float8Backend> core::fmt::Debug for Saved<B> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        self.copy.fmt(f)
    }
}

/// What wgrad will read of x, which fprop has read.
fn save<B: Float8Backend>(x: &Float8Tensor<B>, w: &Float8Tensor<B>) -> SavedInput<B> {
    let (owner, ws) = (Owner::of_forward(w), w.whole_shape());
    let call = GemmCall::new(&owner, Gemm::Wgrad, [rows(&x.shape()), ws[0], ws[1]]);
    let Ok(config) = call.decide::<B>(&B::float_device(x.full()), [x.dtype(), w.dtype()]) else {
        return SavedInput::Full(owner, x.clone());
    };
    let layer = &owner.layer;
    let request = |operand| CastRequest { operand, layer, config: &config, in_forward: true };
    let copy = fp8_copy(x, View::Own, request(Operand::INPUT_T));
    w.cache().set_trained();
    // No wgrad will look for this use.
    x.cache().with_uses(|uses| {
        uses.iter_mut().filter(|used| Arc::ptr_eq(&used.layer, layer)).for_each(|used| used.pending = false);
    });
    let operands = [(x, Operand::INPUT), (x, Operand::INPUT_T), (w, Operand::WEIGHT_T)];
    let observations = operands.iter().filter_map(|(t, operand)| observation(t, layer, &config, *operand)).collect();
    let samples = operands.iter().filter_map(|(t, operand)| take_sample(t, View::Own, request(*operand))).collect();
    SavedInput::Float8(Saved { copy, owner, config, observations, samples })
}

/// dw with the operand of x that [`save`] made.
fn wgrad<B: Float8Backend>(saved: Saved<B>, dy: &Float8Tensor<B>, weight_dtype: DType) -> Float8Tensor<B> {
    let Saved { copy: x, owner, config, observations, samples } = saved;
    let (device, dys) = (B::float_device(dy.full()), dy.shape());
    let layer = &owner.layer;
    enter_wgrad::<B>(layer, &device);
    observations.iter().for_each(|observation| observation.confirm());
    let (k, n) = (B::fp8_size(&x.operand).rows, last(&dys));
    let call = GemmCall::new(&owner, Gemm::Wgrad, [rows(&dys), k, n]);
    let request = CastRequest { operand: Operand::GRAD_OUTPUT_T, layer, config: &config, in_forward: false };
    let dy_copy = fp8_copy(dy, View::Own, request);
    let out = (Shape::from(vec![k, n]), weight_dtype);
    let dw = call.run([&x, &dy_copy], None, None, out, (&device, &config));
    let state = DeviceState::of(layer, &device);
    samples.into_iter().for_each(|sample| push_sample(&state, sample));
    sample_operands(&owner, [(dy, View::Own, Operand::GRAD_OUTPUT_T)]);
    reduced(layer, dw)
}

/// What backward needs.
#[derive(Clone, Debug)]
struct State<B: Float8Backend> {
    /// For wgrad.
    x: Option<SavedInput<B>>,
    /// For dgrad.
    weight: Option<(Owner, Float8Tensor<B>)>,
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
        let (owner, weight) = state.weight.expect("saved if x is tracked");
        grads.register::<Float8<B>>(id, linear::dgrad_of(&owner, weight, dy.clone()));
    }
    if let Some(id) = weight {
        let dw = match state.x.expect("saved if the weight is tracked") {
            SavedInput::Full(Owner { layer, off }, x) => {
                // x may have other uses than this one.
                let shape = [last(&x.shape()), last(&dy.shape())];
                dy.cache().set_use(LinearUse::new(layer, off, state.weight_dtype, shape));
                linear::wgrad(x, dy.clone())
            }
            SavedInput::Float8(saved) => wgrad(saved, &dy, state.weight_dtype),
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

/// [`forward`](linear::forward) with all gradients.
pub(crate) fn forward_autodiff<B: Float8Backend, C: CheckpointStrategy>(
    x: FloatTensor<Autodiff<Float8<B>, C>>,
    weight: FloatTensor<Autodiff<Float8<B>, C>>,
    bias: Option<FloatTensor<Autodiff<Float8<B>, C>>>,
) -> FloatTensor<Autodiff<Float8<B>, C>> {
    let run = || {
        let bias = bias.as_ref().map(|bias| bias.primitive.clone());
        linear::forward(x.primitive.clone(), weight.primitive.clone(), bias)
    };
    let state = || State {
        x: weight.is_tracked().then(|| save(&x.primitive, &weight.primitive)),
        weight: x.is_tracked().then(|| (Owner::of_forward(&weight.primitive), weight.primitive.clone())),
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
