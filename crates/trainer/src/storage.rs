//! Storage dtype of parameters.

use burn::module::AutodiffModule;
use burn::tensor::backend::AutodiffBackend;
use burn::tensor::{DType, TensorMetadata};
use burn_float8::shard_hooks::{Change, map_params};

/// Casts the matrices of a module to `dtype`, rounded to nearest. Vectors are small and stay in
/// f32.
pub(crate) fn store_matrices<B: AutodiffBackend, M: AutodiffModule<B>>(module: M, dtype: DType) -> M {
    map_params::<B, M>(module, |param| match param.float().filter(|_| param.shape.num_dims() >= 2) {
        Some(value) if value.dtype() != dtype => Change::Replaced(B::float_cast(value, dtype.into())),
        _ => Change::None,
    })
}
