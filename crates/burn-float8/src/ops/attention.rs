//! Scaled dot-product attention as one node: it keeps q, k and v, and backward makes the probabilities again.
use burn_autodiff::Autodiff;
use burn_autodiff::NodeId;
use burn_autodiff::checkpoint::base::Checkpointer;
use burn_autodiff::checkpoint::strategy::CheckpointStrategy;
use burn_autodiff::grads::Gradients;
use burn_autodiff::ops::{Backward, Ops, OpsKind};
use burn_backend::ops::AttentionModuleOptions;
use burn_backend::tensor::{BoolTensor, FloatTensor};
use burn_backend::{Backend, DType, TensorMetadata};

use super::register_gradients;
use crate::backend::{Attention, AttentionOutput, Float8Backend};
use crate::profile::operation;
use crate::tensor::Wrapped;

/// Burn's operation: by the node, unless it asks for what the node does not have, such as f64 or a gradient of the bias.
pub(super) fn attention<W: Wrapped>(
    [query, key, value]: [FloatTensor<W>; 3],
    mask: Option<BoolTensor<W>>,
    bias: Option<FloatTensor<W>>,
    options: AttentionModuleOptions,
) -> FloatTensor<W> {
    let attention = Attention { query, key, value, mask, bias, documents: None, options };
    let has_bias_gradient = attention.bias.as_ref().is_some_and(W::is_tracked);
    if fits(&attention) && !has_bias_gradient {
        return W::attention_node(attention);
    }
    let _timer = operation("attention");
    let Attention { query, key, value, mask, bias, options, .. } = attention;
    W::attention(query, key, value, mask, bias, options)
}

/// Whether the shapes and dtypes are those of [`Attention`]. Others are the inner backend's to take or refuse.
fn fits<W: Wrapped>(attention: &Attention<W>) -> bool {
    let Attention { query, key, value, mask, bias, options, .. } = attention;
    let [batch, heads, queries, dim] = query.shape().dims();
    let [_, kv_heads, keys, _] = key.shape().dims();
    let [.., width] = value.shape().dims::<4>();
    let scores = [batch, heads, queries, keys];
    let spreads =
        |shape: burn_std::Shape| shape.dims::<4>().iter().zip(scores).all(|(&own, all)| own == 1 || own == all);
    let dtype = query.dtype();
    [batch, heads, queries, dim, keys, width].iter().all(|&size| size > 0)
        && key.shape().dims() == [batch, kv_heads, keys, dim]
        && value.shape().dims() == [batch, kv_heads, keys, width]
        && kv_heads > 0
        && heads.is_multiple_of(kv_heads)
        && matches!(dtype, DType::F32 | DType::F16 | DType::BF16)
        && [key.dtype(), value.dtype()] == [dtype; 2]
        && mask.iter().all(|mask| spreads(mask.shape()))
        && bias.iter().all(|bias| spreads(bias.shape()))
        && options.softcap.is_none_or(|cap| cap > 0.0)
}

/// Forward on the backend that computes.
pub(super) fn forward<B: Float8Backend>(attention: &Attention<B>) -> AttentionOutput<B> {
    let _timer = operation("attention");
    B::attention_forward(attention)
}

/// The node on autodiff.
pub(super) fn node<B: Float8Backend, C: CheckpointStrategy>(
    attention: Attention<Autodiff<B, C>>,
) -> FloatTensor<Autodiff<B, C>> {
    let Attention { query, key, value, mask, bias, documents, options } = attention;
    let inputs = [query, key, value];
    let [query, key, value] = inputs.each_ref().map(|input| input.primitive.clone());
    let bias = bias.map(|bias| bias.primitive);
    let attention = Attention { query, key, value, mask, bias, documents, options };
    let AttentionOutput::<B> { y, log_sums } = forward(&attention);
    match Node.prepare::<C>(inputs.each_ref().map(|input| input.node.clone())).compute_bound().stateful() {
        OpsKind::Tracked(mut prep) => {
            let inputs = inputs.each_ref().map(|input| prep.checkpoint(input));
            let Attention { mask, bias, documents, options, .. } = attention;
            let saved = log_sums.map(|log_sums| (y.clone(), log_sums));
            prep.finish(State { inputs, mask, bias, documents, options, saved }, y)
        }
        OpsKind::UnTracked(prep) => prep.finish(y),
    }
}

/// What the node keeps. q, k and v are kept as Burn keeps them: gradient checkpointing may compute them again.
#[derive(Clone, Debug)]
struct State<B: Backend> {
    inputs: [NodeId; 3],
    mask: Option<BoolTensor<B>>,
    bias: Option<FloatTensor<B>>,
    documents: Option<burn_backend::tensor::IntTensor<B>>,
    options: AttentionModuleOptions,
    /// y and the sums of rows, if backward reads them.
    saved: Option<(FloatTensor<B>, FloatTensor<B>)>,
}

#[derive(Debug)]
struct Node;

impl<B: Float8Backend> Backward<B, 3> for Node {
    type State = State<B>;

    fn backward(self, ops: Ops<Self::State, 3>, grads: &mut Gradients, checkpointer: &mut Checkpointer) {
        let dy = grads.consume::<B>(&ops.node);
        let State { inputs, mask, bias, documents, options, saved } = ops.state;
        let [query, key, value] = inputs.map(|id| checkpointer.retrieve_node_output(id));
        let attention = Attention { query, key, value, mask, bias, documents, options };
        let timer = operation("attention_backward");
        let gradients = B::attention_backward(&attention, saved, dy);
        drop(timer);
        let parents = ops.parents.map(|node| node.map(|node| node.id));
        register_gradients::<B>(grads, parents, gradients.into_iter().map(Some));
    }
}
