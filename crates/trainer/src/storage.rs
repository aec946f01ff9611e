//! Storage dtype of parameters.

use burn::module::AutodiffModule;
use burn::tensor::backend::AutodiffBackend;
use burn::tensor::ops::FloatTensorOps;
use burn::tensor::{DType, TensorMetadata};
use burn_float8::shard_hooks::{Change, map_params};

/// Casts the matrices of a module to `dtype`, rounded to nearest. Vectors are small and stay in
/// f32.
pub(crate) fn store_matrices<B: AutodiffBackend, M: AutodiffModule<B>>(module: M, dtype: DType) -> M {
    map_params::<B, M>(module, |param| match param.float().filter(|_| param.shape.num_dims() >= 2) {
        Some(value) if value.dtype() != dtype => {
            let is_trained = B::float_is_require_grad(&value);
            let value = B::from_inner(B::InnerBackend::float_cast(B::inner(value), dtype.into()));
            Change::Value(B::float_set_require_grad(value, is_trained))
        }
        _ => Change::None,
    })
}
