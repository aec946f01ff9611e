//! Embeddings with custom gradients: sharded tables, and tables with a dtype narrower than f32.
use std::sync::Arc;

use burn_backend::tensor::{Device, FloatTensor, IntTensor};
use burn_backend::{DType, TensorMetadata};
use burn_std::Shape;

use super::linear::reduced;
use super::parallel;
use crate::backend::{Float8Backend, in_dtype};
use crate::layer::Layer;
use crate::profile::operation;
use crate::tensor::{Float8Tensor, parallel_of};

/// Whether the gradient of a table is accumulated in f32 instead of this dtype. In bf16 the sum of
/// a frequent token stops growing.
pub(super) fn is_narrow(dtype: DType) -> bool {
    matches!(dtype, DType::F16 | DType::BF16)
}

/// Rows `indices: [batch, sequence]` of a table `weights: [V, H]`: `[batch, sequence, H]`.
pub(super) fn forward<B: Float8Backend>(weights: Float8Tensor<B>, indices: IntTensor<B>) -> FloatTensor<B> {
    let hooks = weights.layer().and_then(|layer| parallel_of::<B>(layer)).cloned();
    let dtype = weights.dtype();
    let weights = weights.into_whole(dtype);
    match hooks {
        Some(hooks) => parallel::embedding(&hooks, weights, indices),
        None => B::embedding(weights, indices),
    }
}

/// Properties of the table that its gradient needs.
#[derive(Clone, Debug)]
pub(super) struct SavedTable<B: Float8Backend> {
    /// Layer of a table that ranks divide.
    layer: Option<Arc<Layer>>,
    shape: Shape,
    dtype: DType,
    device: Device<B>,
}

impl<B: Float8Backend> SavedTable<B> {
    pub(super) fn of(weights: &Float8Tensor<B>) -> Self {
        Self {
            layer: weights.layer().filter(|layer| layer.is_divided()).cloned(),
            shape: weights.whole_shape(),
            dtype: weights.dtype(),
            device: B::float_device(weights.full()),
        }
    }

    /// Sum of `dy: [batch, sequence, H]` by row of the table, or of this process' rows of it. It is
    /// accumulated in f32 and rounded once to the table's dtype, before it is exchanged between
    /// processes. Two ranks therefore compute the same step as one rank with two micro-batches.
    pub(super) fn gradient(self, dy: FloatTensor<B>, indices: IntTensor<B>) -> FloatTensor<B> {
        let Self { layer, shape, dtype, device } = self;
        let hooks = layer.as_deref().and_then(|layer| parallel_of::<B>(layer));
        let (indices, dy) = match hooks {
            Some(hooks) => parallel::embedding_tokens(hooks, shape[0], indices, dy),
            None => (indices, dy),
        };
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
