//! Storage dtype of parameters.

use burn::module::AutodiffModule;
use burn::tensor::backend::AutodiffBackend;
use burn::tensor::{DType, TensorMetadata};
use burn_float8::seam::{Change, map_params};

/// Casts the matrices of a module to `dtype`, rounded to nearest. Vectors are small and stay in
/// f32.
pub(crate) fn store_matrices<B: AutodiffBackend, M: AutodiffModule<B>>(module: M, dtype: DType) -> M {
    map_params(module, |param| match param.float() {
        Some(value) if value.shape().num_dims() > 1 && value.dtype() != dtype => {
            Change::Replaced(B::float_cast(value, dtype.into()))
        }
        _ => Change::None,
    })
}
