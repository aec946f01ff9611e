//! The whole of a sharded weight as a tensor, and its gradient by the rows of each rank.
use std::sync::Arc;

use burn_autodiff::Autodiff;
use burn_autodiff::checkpoint::base::Checkpointer;
use burn_autodiff::checkpoint::strategy::CheckpointStrategy;
use burn_autodiff::grads::Gradients;
use burn_autodiff::ops::{Backward, Ops, OpsKind};
use burn_backend::TensorMetadata;
use burn_backend::tensor::FloatTensor;

use super::Float8;
use super::linear::reduced;
use crate::backend::Float8Backend;
use crate::error::Float8Error;
use crate::layer::Layer;
use crate::tensor::Float8Tensor;

/// `[chunk, N]` of each rank → `[K, N]`; another tensor is what it was.
pub(crate) fn forward<B: Float8Backend>(weight: Float8Tensor<B>) -> Float8Tensor<B> {
    if sharded(&weight).is_none() {
        return weight;
    }
    let dtype = weight.dtype();
    Float8Tensor::new(weight.into_whole(dtype))
}

/// [`forward`] with its gradient.
pub(crate) fn forward_autodiff<B: Float8Backend, C: CheckpointStrategy>(
    weight: FloatTensor<Autodiff<Float8<B>, C>>,
) -> FloatTensor<Autodiff<Float8<B>, C>> {
    let Some(layer) = sharded(&weight.primitive) else { return weight };
    let whole = forward(weight.primitive);
    match FullTensorBackward.prepare::<C>([weight.node]).compute_bound().stateful() {
        OpsKind::Tracked(prep) => prep.finish(layer, whole),
        OpsKind::UnTracked(prep) => prep.finish(whole),
    }
}

#[derive(Debug)]
struct FullTensorBackward;

impl<B: Float8Backend> Backward<Float8<B>, 1> for FullTensorBackward {
    type State = Arc<Layer>;

    fn backward(self, ops: Ops<Self::State, 1>, grads: &mut Gradients, _: &mut Checkpointer) {
        let gradient = grads.consume::<Float8<B>>(&ops.node);
        let [node] = ops.parents;
        if let Some(node) = node {
            grads.register::<Float8<B>>(node.id, reduced(&ops.state, gradient));
        }
    }
}

/// The layer of a weight that is this rank's rows.
fn sharded<B: Float8Backend>(weight: &Float8Tensor<B>) -> Option<Arc<Layer>> {
    let layer = weight.layer()?;
    let sharding = layer.sharding()?;
    let (got, rows) = (weight.shape().to_vec(), [sharding.chunk(), sharding.logical()[1]]);
    if got != rows {
        panic!("{}", Float8Error::NotRows { layer: layer.name().into(), got, rows });
    }
    Some(layer.clone())
}
