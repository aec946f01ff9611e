//! The look-up in an embedding and its gradient, in the tensors' own precision, where the table may be sharded.
use burn_backend::tensor::IntTensor;
use burn_backend::{FloatDType, TensorMetadata};

use super::linear::reduced;
use crate::backend::Float8Backend;
use crate::profile::operation;
use crate::tensor::Float8Tensor;

/// Rows `indices: [batch, sequence]` of `weights: [V, H]`: `[batch, sequence, H]`.
pub(crate) fn forward<B: Float8Backend>(weights: Float8Tensor<B>, indices: IntTensor<B>) -> Float8Tensor<B> {
    let dtype = weights.dtype();
    let weights = weights.into_whole(dtype);
    let _timer = operation("embedding");
    Float8Tensor::new(B::embedding(weights, indices))
}

/// The sum of `output_grad: [batch, sequence, H]` by row of the table, of this rank's rows where it is sharded.
pub(crate) fn backward<B: Float8Backend>(
    weights: Float8Tensor<B>,
    output_grad: Float8Tensor<B>,
    indices: IntTensor<B>,
) -> Float8Tensor<B> {
    let layer = weights.layer().filter(|layer| layer.sharding().is_some()).cloned();
    let table = match &layer {
        // Burn reads its shape alone.
        Some(_) => {
            let dtype = FloatDType::from(weights.dtype());
            B::float_zeros(weights.whole_shape(), &B::float_device(weights.full()), dtype)
        }
        None => weights.into_full(),
    };
    let timer = operation("embedding_backward");
    let gradient = Float8Tensor::new(B::embedding_backward(table, output_grad.into_full(), indices));
    drop(timer);
    match layer {
        Some(layer) => reduced(&layer, gradient),
        None => gradient,
    }
}
