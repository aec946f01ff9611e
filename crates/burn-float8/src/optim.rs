//! A step of AdamW in one pass over a parameter, where the backend makes it so: those of CPUs do.
use burn::tensor::backend::Backend;
use burn::tensor::{Tensor, TensorPrimitive};
use burn_backend::tensor::FloatTensor;

use crate::backend::{AdamWFn, AdamWTensors};
pub use crate::backend::{AdamWStep, RoundingKeys};
use crate::ops::functions::find;

/// Steps of AdamW on one backend.
#[derive(Clone, Copy, Debug)]
pub struct FusedAdamW<B: Backend>(AdamWFn<B>);

impl<B: Backend> FusedAdamW<B> {
    /// None if the backend, which must be one without autodiff, has only its operations.
    pub fn find() -> Option<Self> {
        Some(Self(find::<B>()?.adamw?))
    }

    /// The parameter after the step, and both moments. All tensors have one shape, and each keeps its dtype; what nothing else holds is
    /// changed where it lies. At the first step the values of moments are not read.
    ///
    /// # Panics
    /// If shapes differ, and if [`RoundingKeys`] are not as many as there are places along each axis.
    pub fn step<const D: usize>(
        self,
        step: &AdamWStep,
        param: Tensor<B, D>,
        moments: [Tensor<B, D>; 2],
        grad: Tensor<B, D>,
    ) -> (Tensor<B, D>, [Tensor<B, D>; 2]) {
        let dims = param.dims();
        assert!(moments.each_ref().map(Tensor::dims) == [dims; 2] && grad.dims() == dims, "tensors of one shape");
        let primitive = |tensor: Tensor<B, D>| -> FloatTensor<B> { tensor.into_primitive().tensor() };
        let tensors = AdamWTensors { param: primitive(param), moments: moments.map(primitive) };
        let AdamWTensors { param, moments } = (self.0)(step, tensors, primitive(grad));
        let tensor = |tensor| Tensor::from_primitive(TensorPrimitive::Float(tensor));
        (tensor(param), moments.map(tensor))
    }
}
