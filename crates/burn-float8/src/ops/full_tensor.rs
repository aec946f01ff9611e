//! The whole of a weight that has a source, as a tensor.
use std::sync::Arc;

use burn_backend::TensorMetadata;

use crate::backend::Float8Backend;
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
/// If the tensor is something else that was computed from such a weight.
pub(super) fn sourced<B: Float8Backend>(weight: &Float8Tensor<B>) -> Option<Arc<Layer>> {
    let layer = weight.layer()?;
    let (got, rows) = (weight.shape().to_vec(), source_of::<B>(layer)?.own_shape());
    if got != rows {
        let layer = layer.name();
        panic!(
            "{layer}: full_tensor is of a shard {rows:?}, not of {got:?}: transpose or slice the whole weight instead"
        );
    }
    Some(layer.clone())
}
