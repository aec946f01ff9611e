//! [`Float8Stack`]: a [`Float8`] backend with or without autodiff.
use std::sync::Arc;

use burn_backend::Backend;
use burn_backend::tensor::{Device, FloatTensor};

use crate::backend::{DeviceMemory, Float8Backend};
use crate::layer::{Layer, untagged};
use crate::ops::Float8;
use crate::tensor::{Float8Tensor, Wrapped};

mod sealed {
    pub trait Sealed {}
}
impl<W: Wrapped> sealed::Sealed for Float8<W> {}

/// A `Float8` backend: [`Float8<Autodiff<B>>`](Float8), which trains, or `Float8<B>`.
///
/// A training loop that is generic over its backend names both, since `valid()` returns a model of
/// the second:
///
/// ```
/// use burn::module::AutodiffModule;
/// use burn::tensor::backend::AutodiffBackend;
/// use burn_float8::report::{Report, report};
/// use burn_float8::Float8Stack;
///
/// fn reports<B, M>(model: &M) -> [Report; 2]
/// where
///     B: Float8Stack + AutodiffBackend<InnerBackend: Float8Stack>,
///     M: AutodiffModule<B>,
/// {
///     [report(model), report(&model.valid())]
/// }
/// ```
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not a `Float8` backend: Float8 wraps the backend that you train with",
    note = "write `Float8<Autodiff<B>>`, also in place of `Autodiff<Float8<B>>`"
)]
pub trait Float8Stack:
    Backend<FloatTensorPrimitive = Float8Tensor<<Self as Float8Stack>::Wrapped>> + sealed::Sealed
{
    /// The compute backend.
    type Inner: Float8Backend<Device = Self::Device>;

    /// The wrapped backend: the compute backend, or its `Autodiff`.
    #[doc(hidden)]
    type Wrapped: Wrapped<Plain = Self::Inner>;

    /// Device memory held by the compute backend, if it counts that (CubeCL).
    fn device_memory(device: &Device<Self>) -> Option<DeviceMemory> {
        Self::Inner::fp8_device_memory(device)
    }

    /// Replaces the value and tag of this leaf with the result of `f`.
    #[doc(hidden)]
    fn map_float8(
        tensor: FloatTensor<Self>,
        f: impl FnOnce(Float8Tensor<Self::Inner>) -> Float8Tensor<Self::Inner>,
    ) -> FloatTensor<Self> {
        let new = f(tensor.plain());
        new.map(|value| Self::Wrapped::replace(tensor.full().clone(), value))
    }

    /// Layer of this weight.
    fn layer(tensor: &FloatTensor<Self>) -> Option<Arc<Layer>> {
        tensor.layer().cloned()
    }

    /// This tensor below autodiff.
    #[doc(hidden)]
    fn float8_tensor(tensor: &FloatTensor<Self>) -> Float8Tensor<Self::Inner> {
        tensor.plain()
    }

    /// Layer of all untagged weights of a device.
    fn untagged_layer(device: &Device<Self>) -> Arc<Layer> {
        untagged::<Self::Inner>(device)
    }
}

impl<W: Wrapped> Float8Stack for Float8<W> {
    type Inner = W::Plain;
    type Wrapped = W;
}
