//! Nodes that [`Float8<Autodiff<B>>`](crate::Float8) adds to autodiff: linear, grouped linear,
//! attention, fused operations, gathers of sharded weights, and embeddings of sharded or bf16
//! tables. Without autodiff they are the same operations.
//!
//! ```text
//! x ──casts──► x, xᵀ ──┐             y
//! w ──casts──► wᵀ, w ──┴─ GEMM ────► │ node: layer, plan, xᵀ, w with its copies, amaxes
//!                                   dy ──casts──► dy, dyᵀ ──► two GEMMs ──► dx, dw
//! ```
//!
//! Forward fixes a node's state. Backward reads only this state and dy.
use std::sync::Arc;

use burn_autodiff::checkpoint::base::Checkpointer;
use burn_autodiff::checkpoint::strategy::CheckpointStrategy;
use burn_autodiff::grads::Gradients;
use burn_autodiff::ops::{Backward, Ops, OpsKind};
use burn_autodiff::{Autodiff, NodeId};
use burn_backend::TensorMetadata;
use burn_backend::tensor::{FloatTensor, IntTensor};

use super::linear::{self, Wanted, reduced};
use super::parallel::{Vocabulary, exchanged, part_of};
use super::{embedding, full_tensor, fused, grouped, register_gradients};
use crate::backend::{Float8Backend, Fused};
use crate::error::Float8Error;
use crate::layer::{Layer, UNTAGGED_NAME};
use crate::tensor::{Direction, Float8Tensor, LinearPart, Route, Wrapped, parallel_of, sealed};

impl<B: Float8Backend> sealed::Sealed for B {}
impl<B: Float8Backend, C: CheckpointStrategy> sealed::Sealed for Autodiff<B, C> {}

impl<B: Float8Backend> Wrapped for B {
    type Plain = B;

    fn plain(tensor: &FloatTensor<B>) -> &FloatTensor<B> {
        tensor
    }

    fn replace(_: FloatTensor<B>, value: FloatTensor<B>) -> FloatTensor<B> {
        value
    }

    fn fp8_linear(x: Float8Tensor<B>, w: Float8Tensor<B>, bias: Option<FloatTensor<B>>) -> FloatTensor<B> {
        linear::forward(&x, &w, bias, Wanted::EVALUATION).0
    }

    fn fp8_grouped_linear(x: Float8Tensor<B>, w: Float8Tensor<B>, ends: IntTensor<B>) -> FloatTensor<B> {
        grouped::forward(&x, &w, ends, Wanted::EVALUATION).0
    }

    fn fused_node(op: Fused<B>, inputs: Vec<FloatTensor<B>>) -> FloatTensor<B> {
        fused::forward(&op, &inputs).swap_remove(0)
    }

    fn is_tracked(_: &FloatTensor<B>) -> bool {
        false
    }

    fn fp8_full_tensor(weight: Float8Tensor<B>) -> Float8Tensor<B> {
        full_tensor::forward(weight)
    }

    fn linear_part(layer: &Layer) -> Option<LinearPart> {
        parallel_of::<B>(layer).map(|hooks| hooks.part())
    }

    fn parallel_tokens(x: FloatTensor<B>, layer: &Arc<Layer>, direction: Direction) -> FloatTensor<B> {
        exchanged::<B>(part_of(layer), x, direction)
    }

    fn parallel_log_likelihood(logits: FloatTensor<B>, targets: IntTensor<B>, layer: &Arc<Layer>) -> FloatTensor<B> {
        Vocabulary::<B>::new(layer, &logits, targets).log_likelihood(logits).0
    }

    fn expert_rows(rows: FloatTensor<B>, route: &Arc<Route<B>>, direction: Direction) -> FloatTensor<B> {
        route.apply(rows, direction)
    }

    fn fp8_embedding(weights: Float8Tensor<B>, indices: IntTensor<B>) -> FloatTensor<B> {
        embedding::forward(weights, indices)
    }
}

impl<B: Float8Backend, C: CheckpointStrategy> Wrapped for Autodiff<B, C> {
    type Plain = B;

    fn plain(tensor: &FloatTensor<Self>) -> &FloatTensor<B> {
        &tensor.primitive
    }

    fn replace(leaf: FloatTensor<Self>, value: FloatTensor<B>) -> FloatTensor<Self> {
        FloatTensor::<Self> { primitive: value, ..leaf }
    }

    fn fp8_linear(x: Float8Tensor<Self>, w: Float8Tensor<Self>, bias: Option<FloatTensor<Self>>) -> FloatTensor<Self> {
        match &bias {
            Some(bias) => linear_node::<B, C, 3>(&x, &w, Some(bias)),
            None => linear_node::<B, C, 2>(&x, &w, None),
        }
    }

    fn fp8_grouped_linear(x: Float8Tensor<Self>, w: Float8Tensor<Self>, ends: IntTensor<B>) -> FloatTensor<Self> {
        let run = |wanted| grouped::forward(&x.plain(), &w.plain(), ends.clone(), wanted);
        let wanted = Wanted { x: x.full().is_tracked(), w: w.full().is_tracked(), ..Wanted::default() };
        match GroupedLinearNode.prepare::<C>([x.full().node.clone(), w.full().node.clone()]).compute_bound().stateful()
        {
            OpsKind::Tracked(mut prep) => {
                let (y, saved) = run(wanted);
                let saved = saved.expect("a gradient is wanted");
                let x = saved.x.is_full().then(|| prep.checkpoint(x.full()));
                prep.finish(LinearState { saved, x }, y)
            }
            OpsKind::UnTracked(prep) => prep.finish(run(Wanted::default()).0),
        }
    }

    fn fused_node(op: Fused<B>, inputs: Vec<FloatTensor<Self>>) -> FloatTensor<Self> {
        fused::node::<B, C>(op, inputs)
    }

    fn is_tracked(tensor: &FloatTensor<Self>) -> bool {
        tensor.is_tracked()
    }

    fn fp8_full_tensor(weight: Float8Tensor<Self>) -> Float8Tensor<Self> {
        let (plain, dtype) = (weight.plain(), weight.dtype());
        let Some(layer) = full_tensor::sourced(&plain) else { return weight };
        let whole = plain.into_whole(dtype);
        Float8Tensor::new(match FullTensorNode.prepare::<C>([weight.into_full().node]).compute_bound().stateful() {
            OpsKind::Tracked(prep) => prep.finish(layer, whole),
            OpsKind::UnTracked(prep) => prep.finish(whole),
        })
    }

    fn linear_part(layer: &Layer) -> Option<LinearPart> {
        parallel_of::<B>(layer).map(|hooks| hooks.part())
    }

    fn parallel_tokens(x: FloatTensor<Self>, layer: &Arc<Layer>, direction: Direction) -> FloatTensor<Self> {
        let moved = exchanged::<B>(part_of(layer), x.primitive, direction);
        match ParallelTokensNode.prepare::<C>([x.node]).compute_bound().stateful() {
            OpsKind::Tracked(prep) => prep.finish((layer.clone(), direction.reversed()), moved),
            OpsKind::UnTracked(prep) => prep.finish(moved),
        }
    }

    fn parallel_log_likelihood(
        logits: FloatTensor<Self>,
        targets: IntTensor<B>,
        layer: &Arc<Layer>,
    ) -> FloatTensor<Self> {
        let vocabulary = Vocabulary::<B>::new(layer, &logits.primitive, targets);
        let (y, log_sums) = vocabulary.log_likelihood(logits.primitive.clone());
        match ParallelLogLikelihoodNode.prepare::<C>([logits.node.clone()]).compute_bound().stateful() {
            OpsKind::Tracked(mut prep) => {
                let logits = prep.checkpoint(&logits);
                prep.finish((vocabulary, log_sums, logits), y)
            }
            OpsKind::UnTracked(prep) => prep.finish(y),
        }
    }

    fn expert_rows(rows: FloatTensor<Self>, route: &Arc<Route<B>>, direction: Direction) -> FloatTensor<Self> {
        let moved = route.apply(rows.primitive, direction);
        match ExpertRowsNode.prepare::<C>([rows.node]).compute_bound().stateful() {
            OpsKind::Tracked(prep) => prep.finish((route.clone(), direction.reversed()), moved),
            OpsKind::UnTracked(prep) => prep.finish(moved),
        }
    }

    fn fp8_embedding(weights: Float8Tensor<Self>, indices: IntTensor<B>) -> FloatTensor<Self> {
        let y = embedding::forward(weights.plain(), indices.clone());
        let table = embedding::SavedTable::of(&weights.plain());
        match EmbeddingNode.prepare::<C>([weights.into_full().node]).compute_bound().stateful() {
            OpsKind::Tracked(prep) => prep.finish((table, indices), y),
            OpsKind::UnTracked(prep) => prep.finish(y),
        }
    }
}

/// Whether a weight requires a gradient.
///
/// # Panics
///
/// With the message of [`Float8Error::Fp8OnlyTrained`], if it is FP8-only.
fn is_trained<B: Float8Backend, C: CheckpointStrategy>(w: &Float8Tensor<Autodiff<B, C>>) -> bool {
    let is_tracked = w.full().is_tracked();
    if is_tracked && w.is_fp8_only() {
        let layer = w.layer().map_or(UNTAGGED_NAME, |layer| layer.name()).into();
        panic!("{}", Float8Error::Fp8OnlyTrained { layer });
    }
    is_tracked
}

/// Node state of a linear, grouped or not. x is checkpointed like the input of Burn's linear:
/// gradient checkpointing may recompute it.
#[derive(Clone, Debug)]
struct LinearState<S> {
    saved: S,
    x: Option<NodeId>,
}

/// Node of a linear with the parents x, w, and the bias if there is one.
#[derive(Debug)]
struct LinearNode<const N: usize>;

fn linear_node<B: Float8Backend, C: CheckpointStrategy, const N: usize>(
    x: &Float8Tensor<Autodiff<B, C>>,
    w: &Float8Tensor<Autodiff<B, C>>,
    bias: Option<&FloatTensor<Autodiff<B, C>>>,
) -> FloatTensor<Autodiff<B, C>> {
    let wanted = Wanted {
        x: x.full().is_tracked(),
        w: is_trained(w),
        bias: bias.is_some_and(|bias| bias.is_tracked()),
        evaluates: false,
    };
    let run = |wanted| linear::forward(&x.plain(), &w.plain(), bias.map(|bias| bias.primitive.clone()), wanted);
    let parents = [x.full(), w.full()];
    let parent = |i| parents.into_iter().chain(bias).nth(i).expect("a parent").node.clone();
    match LinearNode::<N>.prepare::<C>(core::array::from_fn(parent)).compute_bound().stateful() {
        OpsKind::Tracked(mut prep) => {
            let (y, saved) = run(wanted);
            let saved = saved.expect("a gradient is wanted");
            let x = saved.x.is_full().then(|| prep.checkpoint(x.full()));
            prep.finish(LinearState { saved, x }, y)
        }
        OpsKind::UnTracked(prep) => prep.finish(run(Wanted::default()).0),
    }
}

impl<B: Float8Backend, const N: usize> Backward<B, N> for LinearNode<N> {
    type State = LinearState<linear::SavedLinear<B>>;

    fn backward(self, ops: Ops<Self::State, N>, grads: &mut Gradients, checkpointer: &mut Checkpointer) {
        let dy = grads.consume::<B>(&ops.node);
        let LinearState { saved, x } = ops.state;
        let x = x.map(|id| checkpointer.retrieve_node_output(id));
        let parents = [0, 1, 2].map(|i| ops.parents.get(i).and_then(Option::as_ref).map(|node| node.id));
        let [wants_x, wants_w, wants_bias] = parents.map(|parent| parent.is_some());
        let wanted = Wanted { x: wants_x, w: wants_w, bias: wants_bias, evaluates: false };
        register_gradients::<B>(grads, parents, linear::backward(saved, dy, x, wanted));
    }
}

#[derive(Debug)]
struct GroupedLinearNode;

impl<B: Float8Backend> Backward<B, 2> for GroupedLinearNode {
    type State = LinearState<grouped::SavedGrouped<B>>;

    fn backward(self, ops: Ops<Self::State, 2>, grads: &mut Gradients, checkpointer: &mut Checkpointer) {
        let dy = grads.consume::<B>(&ops.node);
        let LinearState { saved, x } = ops.state;
        let x = x.map(|id| checkpointer.retrieve_node_output(id));
        let parents = ops.parents.map(|node| node.map(|node| node.id));
        let wanted = Wanted { x: parents[0].is_some(), w: parents[1].is_some(), ..Wanted::default() };
        register_gradients::<B>(grads, parents, grouped::backward(saved, dy, x, wanted));
    }
}

#[derive(Debug)]
struct FullTensorNode;

impl<B: Float8Backend> Backward<B, 1> for FullTensorNode {
    type State = Arc<Layer>;

    fn backward(self, ops: Ops<Self::State, 1>, grads: &mut Gradients, _: &mut Checkpointer) {
        let gradient = grads.consume::<B>(&ops.node);
        if let [Some(node)] = ops.parents {
            grads.register::<B>(node.id, reduced::<B>(&ops.state, gradient));
        }
    }
}

#[derive(Debug)]
struct ParallelTokensNode;

impl<B: Float8Backend> Backward<B, 1> for ParallelTokensNode {
    /// Layer, and direction of the gradients.
    type State = (Arc<Layer>, Direction);

    fn backward(self, ops: Ops<Self::State, 1>, grads: &mut Gradients, _: &mut Checkpointer) {
        let dy = grads.consume::<B>(&ops.node);
        let (layer, direction) = ops.state;
        if let [Some(node)] = ops.parents {
            grads.register::<B>(node.id, exchanged::<B>(part_of(&layer), dy, direction));
        }
    }
}

#[derive(Debug)]
struct ExpertRowsNode;

impl<B: Float8Backend> Backward<B, 1> for ExpertRowsNode {
    /// Route, and direction of the gradients.
    type State = (Arc<Route<B>>, Direction);

    fn backward(self, ops: Ops<Self::State, 1>, grads: &mut Gradients, _: &mut Checkpointer) {
        let dy = grads.consume::<B>(&ops.node);
        let (route, direction) = ops.state;
        if let [Some(node)] = ops.parents {
            grads.register::<B>(node.id, route.apply(dy, direction));
        }
    }
}

#[derive(Debug)]
struct ParallelLogLikelihoodNode;

impl<B: Float8Backend> Backward<B, 1> for ParallelLogLikelihoodNode {
    /// Vocabulary, logarithms of the sums of all exponentials, and the node of the logits.
    type State = (Vocabulary<B>, FloatTensor<B>, NodeId);

    fn backward(self, ops: Ops<Self::State, 1>, grads: &mut Gradients, checkpointer: &mut Checkpointer) {
        let dy = grads.consume::<B>(&ops.node);
        let (vocabulary, log_sums, logits) = ops.state;
        let logits = checkpointer.retrieve_node_output(logits);
        if let [Some(node)] = ops.parents {
            grads.register::<B>(node.id, vocabulary.gradient(logits, log_sums, dy));
        }
    }
}

#[derive(Debug)]
struct EmbeddingNode;

impl<B: Float8Backend> Backward<B, 1> for EmbeddingNode {
    type State = (embedding::SavedTable<B>, IntTensor<B>);

    fn backward(self, ops: Ops<Self::State, 1>, grads: &mut Gradients, _: &mut Checkpointer) {
        let dy = grads.consume::<B>(&ops.node);
        let (table, indices) = ops.state;
        if let [Some(node)] = ops.parents {
            grads.register::<B>(node.id, table.gradient(dy, indices));
        }
    }
}
