//! Storage dtype of parameters.

use std::marker::PhantomData;

use burn::module::{AutodiffModule, ModuleMapper, Param};
use burn::tensor::backend::AutodiffBackend;
use burn::tensor::{DType, Tensor};

/// Casts the matrices of a module to `dtype`, rounded to nearest. Vectors are small and stay in
/// f32.
pub(crate) fn store_matrices<B: AutodiffBackend, M: AutodiffModule<B>>(module: M, dtype: DType) -> M {
    struct Store<B>(DType, PhantomData<B>);
    impl<B: AutodiffBackend> ModuleMapper<B> for Store<B> {
        fn map_float<const D: usize>(&mut self, param: Param<Tensor<B, D>>) -> Param<Tensor<B, D>> {
            if D < 2 || param.val().dtype() == self.0 {
                return param;
            }
            let (id, tensor, mapper) = param.consume();
            let requires_grad = tensor.is_require_grad();
            let tensor = Tensor::from_inner(tensor.inner().cast(self.0)).set_require_grad(requires_grad);
            Param::from_mapped_value(id, tensor, mapper)
        }
    }
    module.map(&mut Store::<B>(dtype, PhantomData))
}
