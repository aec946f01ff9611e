//! AdamW in one pass over a parameter.
use burn::tensor::backend::Backend;
use burn::tensor::{Tensor, TensorPrimitive};
use burn_backend::tensor::{Device, FloatTensor};

pub use crate::backend::{AdamWDtypes, AdamWStep, RoundingKeys};
use crate::backend::{AdamWFn, AdamWRequest, AdamWTensors};
use crate::ops::functions::find;

/// AdamW steps on one backend.
#[derive(Debug)]
pub struct FusedAdamW<B: Backend>(AdamWFn<B>);

impl<B: Backend> FusedAdamW<B> {
    /// The step for tensors of these dtypes. None if the backend has none on this device. A backend
    /// with autodiff never does.
    pub fn find(device: &Device<B>, dtypes: AdamWDtypes) -> Option<Self> {
        find::<B>()?.adamw?(device, dtypes).map(Self)
    }

    /// Returns the parameter after the step, and both moments. All tensors have the same shape, and
    /// each keeps its dtype. Tensors without another handle are changed in place. At the first step
    /// the values of the moments are not read.
    ///
    /// # Panics
    /// If shapes differ, or the [`RoundingKeys`] do not match the shape.
    pub fn step<const D: usize>(
        &self,
        step: AdamWStep,
        param: Tensor<B, D>,
        moments: [Tensor<B, D>; 2],
        grad: Tensor<B, D>,
    ) -> (Tensor<B, D>, [Tensor<B, D>; 2]) {
        let dims = param.dims();
        assert!(moments.each_ref().map(Tensor::dims) == [dims; 2] && grad.dims() == dims, "tensors of one shape");
        let primitive = |tensor: Tensor<B, D>| -> FloatTensor<B> { tensor.into_primitive().tensor() };
        let tensors = AdamWTensors { param: primitive(param), moments: moments.map(primitive) };
        let request = AdamWRequest { step, tensors, grad: primitive(grad), wants_amax: false };
        let AdamWTensors { param, moments } = (self.0)(request).tensors;
        let tensor = |tensor| Tensor::from_primitive(TensorPrimitive::Float(tensor));
        (tensor(param), moments.map(tensor))
    }
}
