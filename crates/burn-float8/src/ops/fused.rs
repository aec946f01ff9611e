//! [`Fused`] operations as nodes: they keep what goes in, and backward computes the rest again. Gradients of what a linear has
//! made are left for its node with their maxima.
use std::sync::Arc;

use burn_autodiff::Autodiff;
use burn_autodiff::NodeId;
use burn_autodiff::checkpoint::base::Checkpointer;
use burn_autodiff::checkpoint::strategy::CheckpointStrategy;
use burn_autodiff::grads::Gradients;
use burn_autodiff::ops::{Backward, Ops, OpsKind};
use burn_backend::TensorMetadata;
use burn_backend::tensor::FloatTensor;
use burn_std::Shape;

use crate::backend::{Float8Backend, Fused, FusedOutput};
use crate::profile::operation;
use crate::tensor::{Deferred, Float8Tensor, GradientSlot};

/// Forward on the backend that computes.
pub(super) fn forward<B: Float8Backend>(op: &Fused<B>, inputs: &[FloatTensor<B>]) -> Float8Tensor<B> {
    if let Some(deferred) = Deferred::new(op, inputs) {
        return Float8Tensor::of_deferred(inputs[0].clone(), deferred);
    }
    let _timer = operation(op.name());
    let FusedOutput { y, maxima } = B::fused_forward(op, inputs);
    Float8Tensor::with_maxima(y, maxima)
}

/// The node on autodiff, of one input or two.
pub(super) fn node<B: Float8Backend, C: CheckpointStrategy>(
    op: Fused<B>,
    inputs: Vec<Float8Tensor<Autodiff<B, C>>>,
) -> Float8Tensor<Autodiff<B, C>> {
    match <[_; 2]>::try_from(inputs) {
        Ok(inputs) => node_of::<B, C, 2>(op, inputs),
        Err(inputs) => node_of::<B, C, 1>(op, <[_; 1]>::try_from(inputs).expect("one input or two")),
    }
}

fn node_of<B: Float8Backend, C: CheckpointStrategy, const N: usize>(
    op: Fused<B>,
    inputs: [Float8Tensor<Autodiff<B, C>>; N],
) -> Float8Tensor<Autodiff<B, C>> {
    let outputs = inputs.each_ref().map(|input| input.output().cloned());
    let inputs = inputs.map(Float8Tensor::into_full);
    let made = forward(&op, &inputs.each_ref().map(|input| input.primitive.clone()));
    // What a linear has made is read as that: a reshape after it is part of this node.
    let read = |i: usize| outputs[i].as_ref().map_or(&inputs[i], |output| &output.y);
    let parents: [_; N] = std::array::from_fn(|i| read(i).node.clone());
    made.placed(|y| match Backwards.prepare::<C>(parents).compute_bound().stateful() {
        OpsKind::Tracked(mut prep) => {
            let kept = std::array::from_fn(|i| Kept {
                id: prep.checkpoint(read(i)),
                shape: inputs[i].shape(),
                slot: outputs[i].as_ref().map(|output| output.slot.clone()),
            });
            prep.finish((op, kept), y)
        }
        OpsKind::UnTracked(prep) => prep.finish(y),
    })
}

/// An input as the operation before made it, that is before a reshape.
#[derive(Clone, Debug)]
struct Kept<B: Float8Backend> {
    id: NodeId,
    /// The shape in which this operation reads it.
    shape: Shape,
    /// Where its gradient is left with its maxima.
    slot: Option<Arc<GradientSlot<B>>>,
}

fn reshaped<B: Float8Backend>(tensor: FloatTensor<B>, shape: &Shape) -> FloatTensor<B> {
    if tensor.shape() == *shape { tensor } else { B::float_reshape(tensor, shape.clone()) }
}

#[derive(Debug)]
struct Backwards;

impl<B: Float8Backend, const N: usize> Backward<B, N> for Backwards {
    type State = (Fused<B>, [Kept<B>; N]);

    fn backward(self, ops: Ops<Self::State, N>, grads: &mut Gradients, checkpointer: &mut Checkpointer) {
        let dy = grads.consume::<B>(&ops.node);
        let (op, kept) = ops.state;
        let made = kept.each_ref().map(|kept| checkpointer.retrieve_node_output::<FloatTensor<B>>(kept.id));
        let shapes = made.each_ref().map(TensorMetadata::shape);
        let mut inputs = made.into_iter().zip(&kept).map(|(made, kept)| reshaped::<B>(made, &kept.shape));
        let inputs: [_; N] = std::array::from_fn(|_| inputs.next().expect("one for each"));
        let with_maxima = kept.iter().any(|kept| kept.slot.is_some());
        let timer = operation(op.backward_name());
        let gradients = B::fused_backward(&op, &inputs, &dy, with_maxima);
        drop(timer);
        let parents = ops.parents.map(|node| node.map(|node| node.id));
        for (((parent, gradient), kept), shape) in parents.into_iter().zip(gradients).zip(kept).zip(shapes) {
            let Some(parent) = parent else { continue };
            let gradient = FusedOutput { y: reshaped::<B>(gradient.y, &shape), maxima: gradient.maxima };
            let left = match (&gradient.maxima, kept.slot) {
                (Some(_), Some(slot)) => slot.leave(gradient),
                _ => Err(gradient),
            };
            if let Err(gradient) = left {
                grads.register::<B>(parent, gradient.y);
            }
        }
    }
}
