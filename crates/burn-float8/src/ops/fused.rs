//! [`Fused`] operations as nodes: they keep what goes in, and backward computes the rest again.
use burn_autodiff::Autodiff;
use burn_autodiff::NodeId;
use burn_autodiff::checkpoint::base::Checkpointer;
use burn_autodiff::checkpoint::strategy::CheckpointStrategy;
use burn_autodiff::grads::Gradients;
use burn_autodiff::ops::{Backward, Ops, OpsKind};
use burn_backend::tensor::FloatTensor;

use super::register_gradients;
use crate::backend::{Float8Backend, Fused, FusedOutput};
use crate::profile::operation;

/// The result of an operation on autodiff, and the maxima of its magnitudes on the backend that computes, where it leaves them.
type Node<B, C> = (FloatTensor<Autodiff<B, C>>, Option<FloatTensor<B>>);

/// Forward on the backend that computes.
pub(super) fn forward<B: Float8Backend>(op: &Fused<B>, inputs: &[FloatTensor<B>]) -> FusedOutput<B> {
    let _timer = operation(op.name());
    B::fused_forward(op, inputs)
}

/// The node on autodiff, of one input or two, and the maxima of its result.
pub(super) fn node<B: Float8Backend, C: CheckpointStrategy>(
    op: Fused<B>,
    inputs: Vec<FloatTensor<Autodiff<B, C>>>,
) -> Node<B, C> {
    match <[_; 2]>::try_from(inputs) {
        Ok(inputs) => node_of::<B, C, 2>(op, inputs),
        Err(inputs) => node_of::<B, C, 1>(op, <[_; 1]>::try_from(inputs).expect("one input or two")),
    }
}

fn node_of<B: Float8Backend, C: CheckpointStrategy, const N: usize>(
    op: Fused<B>,
    inputs: [FloatTensor<Autodiff<B, C>>; N],
) -> Node<B, C> {
    let FusedOutput { y, maxima } = forward(&op, &inputs.each_ref().map(|input| input.primitive.clone()));
    let y = match Backwards.prepare::<C>(inputs.each_ref().map(|input| input.node.clone())).compute_bound().stateful() {
        OpsKind::Tracked(mut prep) => {
            let inputs = inputs.each_ref().map(|input| prep.checkpoint(input));
            prep.finish((op, inputs), y)
        }
        OpsKind::UnTracked(prep) => prep.finish(y),
    };
    (y, maxima)
}

#[derive(Debug)]
struct Backwards;

impl<B: Float8Backend, const N: usize> Backward<B, N> for Backwards {
    type State = (Fused<B>, [NodeId; N]);

    fn backward(self, ops: Ops<Self::State, N>, grads: &mut Gradients, checkpointer: &mut Checkpointer) {
        let dy = grads.consume::<B>(&ops.node);
        let (op, inputs) = ops.state;
        let inputs = inputs.map(|id| checkpointer.retrieve_node_output::<FloatTensor<B>>(id));
        let timer = operation(op.backward_name());
        let gradients = B::fused_backward(&op, &inputs, &dy);
        drop(timer);
        let parents = ops.parents.map(|node| node.map(|node| node.id));
        register_gradients::<B>(grads, parents, gradients.into_iter().map(Some));
    }
}
