//! The whole of a weight that has a source, as a tensor and as the table of an embedding, and the gradients of the rows that this process
//! has.
use std::sync::Arc;

use burn_backend::tensor::{Device, FloatTensor, IntTensor};
use burn_backend::{FloatDType, TensorMetadata};
use burn_std::Shape;

use super::linear::reduced;
use crate::backend::Float8Backend;
use crate::error::Float8Panic;
use crate::layer::Layer;
use crate::tensor::{Float8Tensor, source_of};

/// The rows that this process has → `[K, N]`; another tensor is what it was.
pub(super) fn forward<B: Float8Backend>(weight: Float8Tensor<B>) -> Float8Tensor<B> {
    if sourced(&weight).is_none() {
        return weight;
    }
    let dtype = weight.dtype();
    Float8Tensor::new(weight.into_whole(dtype))
}

/// The layer of a weight that is the rows of this process.
///
/// # Panics
///
/// [`Float8Panic::NotRows`], in words, if the tensor is something else that was computed from such a weight.
pub(super) fn sourced<B: Float8Backend>(weight: &Float8Tensor<B>) -> Option<Arc<Layer>> {
    let layer = weight.layer()?;
    let (got, rows) = (weight.shape().to_vec(), source_of::<B>(layer)?.own_shape());
    if got != rows {
        panic!("{}", Float8Panic::NotRows { layer: layer.name().into(), got, rows });
    }
    Some(layer.clone())
}

/// Rows `indices: [batch, sequence]` of a table with a source `weights: [V, H]`: `[batch, sequence, H]`.
pub(super) fn embedding<B: Float8Backend>(weights: Float8Tensor<B>, indices: IntTensor<B>) -> FloatTensor<B> {
    let dtype = weights.dtype();
    let weights = weights.into_whole(dtype);
    B::embedding(weights, indices)
}

/// What the gradient of such an embedding reads of its table.
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
            layer: weights.layer().expect("a table with a source carries one").clone(),
            shape: weights.whole_shape(),
            dtype: weights.dtype().into(),
            device: B::float_device(weights.full()),
        }
    }

    /// The sum of `dy: [batch, sequence, H]` by row of the table, of the rows that this process has.
    pub(super) fn gradient(self, dy: FloatTensor<B>, indices: IntTensor<B>) -> FloatTensor<B> {
        let Self { layer, shape, dtype, device } = self;
        // Burn reads its shape alone.
        let gradient = B::embedding_backward(B::float_zeros(shape, &device, dtype), dy, indices);
        reduced::<B>(&layer, gradient)
    }
}
