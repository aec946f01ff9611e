//! Embeddings whose gradients are this crate's: those of tables of which this process has some rows, and of tables in less than f32.
use std::sync::Arc;

use burn_backend::tensor::{Device, FloatTensor, IntTensor};
use burn_backend::{DType, TensorMetadata};
use burn_std::Shape;

use super::linear::reduced;
use crate::backend::{Float8Backend, in_dtype};
use crate::layer::Layer;
use crate::profile::operation;
use crate::tensor::Float8Tensor;

/// Whether the gradient of a table in this dtype is added up in f32: in bf16 the sum of a frequent token stops growing.
pub(super) fn is_narrow(dtype: DType) -> bool {
    matches!(dtype, DType::F16 | DType::BF16)
}

/// Rows `indices: [batch, sequence]` of a table `weights: [V, H]`: `[batch, sequence, H]`.
pub(super) fn forward<B: Float8Backend>(weights: Float8Tensor<B>, indices: IntTensor<B>) -> FloatTensor<B> {
    let dtype = weights.dtype();
    let weights = weights.into_whole(dtype);
    B::embedding(weights, indices)
}

/// What the gradient of such an embedding reads of its table.
#[derive(Clone, Debug)]
pub(super) struct Table<B: Float8Backend> {
    /// Of a table with a source.
    layer: Option<Arc<Layer>>,
    shape: Shape,
    dtype: DType,
    device: Device<B>,
}

impl<B: Float8Backend> Table<B> {
    pub(super) fn of(weights: &Float8Tensor<B>) -> Self {
        Self {
            layer: weights.layer().filter(|layer| layer.has_source()).cloned(),
            shape: weights.whole_shape(),
            dtype: weights.dtype(),
            device: B::float_device(weights.full()),
        }
    }

    /// The sum of `dy: [batch, sequence, H]` by row of the table, of the rows that this process has. It is added up in f32 and rounded to the
    /// table's dtype once, before it is exchanged too: the steps of two ranks are those of one with two micro-batches.
    pub(super) fn gradient(self, dy: FloatTensor<B>, indices: IntTensor<B>) -> FloatTensor<B> {
        let Self { layer, shape, dtype, device } = self;
        let tokens = indices.shape().num_elements();
        let wide = if is_narrow(dtype) { DType::F32 } else { dtype };
        let _timer = operation("embedding_backward");
        let zeros = B::float_zeros(shape.clone(), &device, wide.into());
        let dy = B::float_reshape(in_dtype::<B>(dy, wide), Shape::from(vec![tokens, shape[1]]));
        let sums = B::float_select_add(zeros, 0, B::int_reshape(indices, Shape::from(vec![tokens])), dy);
        let gradient = in_dtype::<B>(sums, dtype);
        match layer {
            Some(layer) => reduced::<B>(&layer, gradient),
            None => gradient,
        }
    }
}
