//! [`Fused`] operations as nodes: they keep their inputs, and backward computes the rest again.
use burn_autodiff::Autodiff;
use burn_autodiff::NodeId;
use burn_autodiff::checkpoint::base::Checkpointer;
use burn_autodiff::checkpoint::strategy::CheckpointStrategy;
use burn_autodiff::grads::Gradients;
use burn_autodiff::ops::{Backward, Ops, OpsKind};
use burn_backend::tensor::FloatTensor;

use crate::backend::{Float8Backend, Fused};
use crate::profile::operation;

/// Forward on the backend that computes.
pub(super) fn forward<B: Float8Backend>(op: &Fused<B>, inputs: &[FloatTensor<B>]) -> FloatTensor<B> {
    let _timer = operation(op.name());
    B::fused_forward(op, inputs)
}

/// The node on autodiff, of one input or two.
pub(super) fn node<B: Float8Backend, C: CheckpointStrategy>(
    op: Fused<B>,
    inputs: Vec<FloatTensor<Autodiff<B, C>>>,
) -> FloatTensor<Autodiff<B, C>> {
    match <[_; 2]>::try_from(inputs) {
        Ok(inputs) => node_of::<B, C, 2>(op, inputs),
        Err(inputs) => node_of::<B, C, 1>(op, <[_; 1]>::try_from(inputs).expect("one input or two")),
    }
}

fn node_of<B: Float8Backend, C: CheckpointStrategy, const N: usize>(
    op: Fused<B>,
    inputs: [FloatTensor<Autodiff<B, C>>; N],
) -> FloatTensor<Autodiff<B, C>> {
    let y = forward(&op, &inputs.each_ref().map(|input| input.primitive.clone()));
    let parents = inputs.each_ref().map(|input| input.node.clone());
    match Backwards.prepare::<C>(parents).compute_bound().stateful() {
        OpsKind::Tracked(mut prep) => {
            let kept = inputs.each_ref().map(|input| prep.checkpoint(input));
            prep.finish((op, kept), y)
        }
        OpsKind::UnTracked(prep) => prep.finish(y),
    }
}

#[derive(Debug)]
struct Backwards;

impl<B: Float8Backend, const N: usize> Backward<B, N> for Backwards {
    type State = (Fused<B>, [NodeId; N]);

    fn backward(self, ops: Ops<Self::State, N>, grads: &mut Gradients, checkpointer: &mut Checkpointer) {
        let dy = grads.consume::<B>(&ops.node);
        let (op, kept) = ops.state;
        let inputs = kept.map(|id| checkpointer.retrieve_node_output::<FloatTensor<B>>(id));
        let timer = operation(op.backward_name());
        let gradients = B::fused_backward(&op, &inputs, &dy);
        drop(timer);
        for (parent, gradient) in ops.parents.into_iter().zip(gradients) {
            if let Some(parent) = parent {
                grads.register::<B>(parent.id, gradient);
            }
        }
    }
}
