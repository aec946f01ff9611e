//! [`Fused`] operations as nodes: they keep their inputs, and backward recomputes the rest.
use burn_autodiff::Autodiff;
use burn_autodiff::NodeId;
use burn_autodiff::checkpoint::base::Checkpointer;
use burn_autodiff::checkpoint::strategy::CheckpointStrategy;
use burn_autodiff::grads::Gradients;
use burn_autodiff::ops::{Backward, Ops, OpsKind};
use burn_backend::tensor::FloatTensor;

use super::register_gradients;
use crate::backend::{Float8Backend, Fused, FusedBackward};
use crate::profile::operation;

/// Forward on the compute backend: y, then other outputs that backward reads.
pub(super) fn forward<B: Float8Backend>(op: &Fused<B>, inputs: &[FloatTensor<B>]) -> Vec<FloatTensor<B>> {
    let _timer = operation(op.names()[0]);
    B::fused(op, inputs, None)
}

/// The autodiff node, with one to three inputs.
pub(super) fn node<B: Float8Backend, C: CheckpointStrategy>(
    op: Fused<B>,
    inputs: Vec<FloatTensor<Autodiff<B, C>>>,
) -> FloatTensor<Autodiff<B, C>> {
    match inputs.len() {
        1 => node_of::<B, C, 1>(op, inputs),
        2 => node_of::<B, C, 2>(op, inputs),
        _ => node_of::<B, C, 3>(op, inputs),
    }
}

fn node_of<B: Float8Backend, C: CheckpointStrategy, const N: usize>(
    op: Fused<B>,
    inputs: Vec<FloatTensor<Autodiff<B, C>>>,
) -> FloatTensor<Autodiff<B, C>> {
    let inputs = <[_; N]>::try_from(inputs).expect("one to three inputs");
    let mut outputs = forward(&op, &inputs.each_ref().map(|input| input.primitive.clone()));
    let mut others = outputs.split_off(1);
    let y = outputs.remove(0);
    match Node.prepare::<C>(inputs.each_ref().map(|input| input.node.clone())).compute_bound().stateful() {
        OpsKind::Tracked(mut prep) => {
            let inputs = inputs.each_ref().map(|input| prep.checkpoint(input));
            if !others.is_empty() {
                others.insert(0, y.clone());
            }
            prep.finish(FusedState { op, inputs, outputs: others }, y)
        }
        OpsKind::UnTracked(prep) => prep.finish(y),
    }
}

/// State of a node. Inputs are checkpointed like Burn's: gradient checkpointing may recompute them.
#[derive(Clone, Debug)]
struct FusedState<B: Float8Backend, const N: usize> {
    op: Fused<B>,
    inputs: [NodeId; N],
    /// All outputs of forward, if backward reads them.
    outputs: Vec<FloatTensor<B>>,
}

#[derive(Debug)]
struct Node;

impl<B: Float8Backend, const N: usize> Backward<B, N> for Node {
    type State = FusedState<B, N>;

    fn backward(self, ops: Ops<Self::State, N>, grads: &mut Gradients, checkpointer: &mut Checkpointer) {
        let dy = grads.consume::<B>(&ops.node);
        let FusedState { op, inputs, outputs } = ops.state;
        let inputs = inputs.map(|id| checkpointer.retrieve_node_output::<FloatTensor<B>>(id));
        let timer = operation(op.names()[1]);
        let gradients = B::fused(&op, &inputs, Some(&FusedBackward { outputs: &outputs, dy: &dy }));
        drop(timer);
        let parents = ops.parents.map(|node| node.map(|node| node.id));
        register_gradients::<B>(grads, parents, gradients.into_iter().map(Some));
    }
}
