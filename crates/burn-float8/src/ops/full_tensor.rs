//! The whole of a sharded weight as a tensor and as the table of an embedding, and their gradients by the rows of each rank.
use std::sync::Arc;

use burn_backend::tensor::{Device, FloatTensor, IntTensor};
use burn_backend::{FloatDType, TensorMetadata};
use burn_std::Shape;

use super::linear::reduced;
use crate::backend::Float8Backend;
use crate::error::Float8Error;
use crate::layer::Layer;
use crate::profile::operation;
use crate::tensor::Float8Tensor;

/// `[chunk, N]` of each rank → `[K, N]`; another tensor is what it was.
pub(super) fn forward<B: Float8Backend>(weight: Float8Tensor<B>) -> Float8Tensor<B> {
    if sharded(&weight).is_none() {
        return weight;
    }
    let dtype = weight.dtype();
    Float8Tensor::new(weight.into_whole(dtype))
}

/// The layer of a weight that is this rank's rows.
///
/// # Panics
///
/// [`Float8Error::NotRows`], in words, if the tensor is something else that was computed from such a weight.
pub(super) fn sharded<B: Float8Backend>(weight: &Float8Tensor<B>) -> Option<Arc<Layer>> {
    let layer = weight.layer()?;
    let sharding = layer.sharding()?;
    let (got, rows) = (weight.shape().to_vec(), [sharding.chunk(), sharding.logical()[1]]);
    if got != rows {
        panic!("{}", Float8Error::NotRows { layer: layer.name().into(), got, rows });
    }
    Some(layer.clone())
}

/// Rows `indices: [batch, sequence]` of a sharded table `weights: [V, H]`: `[batch, sequence, H]`.
pub(super) fn embedding<B: Float8Backend>(weights: Float8Tensor<B>, indices: IntTensor<B>) -> FloatTensor<B> {
    let dtype = weights.dtype();
    let weights = weights.into_whole(dtype);
    let _timer = operation("embedding");
    B::embedding(weights, indices)
}

/// What the gradient of a sharded embedding reads of its table.
#[derive(Clone, Debug)]
pub(super) struct Table<B: Float8Backend> {
    layer: Arc<Layer>,
    shape: Shape,
    dtype: FloatDType,
    device: Device<B>,
}

impl<B: Float8Backend> Table<B> {
    pub(super) fn of(weights: &Float8Tensor<B>) -> Self {
        Self {
            layer: weights.layer().expect("a sharded table carries one").clone(),
            shape: weights.whole_shape(),
            dtype: weights.dtype().into(),
            device: B::float_device(weights.full()),
        }
    }

    /// The sum of `dy: [batch, sequence, H]` by row of the table, of this rank's rows.
    pub(super) fn gradient(self, dy: FloatTensor<B>, indices: IntTensor<B>) -> FloatTensor<B> {
        let Self { layer, shape, dtype, device } = self;
        let timer = operation("embedding_backward");
        // Burn reads its shape alone.
        let gradient = B::embedding_backward(B::float_zeros(shape, &device, dtype), dy, indices);
        drop(timer);
        reduced::<B>(&layer, gradient)
    }
}
