//! Gathers a sharded weight as a tensor.
use std::sync::Arc;

use burn_backend::TensorMetadata;

use crate::backend::Float8Backend;
use crate::layer::Layer;
use crate::tensor::{Float8Tensor, source_of};

/// Gathers this process' rows to `[K, N]`. Returns other tensors unchanged.
pub(super) fn forward<B: Float8Backend>(weight: Float8Tensor<B>) -> Float8Tensor<B> {
    if sourced(&weight).is_none() {
        return weight;
    }
    let dtype = weight.dtype();
    Float8Tensor::new(weight.into_whole(dtype))
}

/// Layer of a sharded weight.
///
/// # Panics
///
/// If the tensor was computed from a shard, and is not the shard itself.
pub(super) fn sourced<B: Float8Backend>(weight: &Float8Tensor<B>) -> Option<Arc<Layer>> {
    let layer = weight.layer()?;
    let (got, rows) = (weight.shape().to_vec(), source_of::<B>(layer)?.layout().own_shape);
    if got != rows {
        let layer = layer.name();
        panic!(
            "{layer}: full_tensor is of a shard {rows:?}, not of {got:?}: transpose or slice the whole weight instead"
        );
    }
    Some(layer.clone())
}
