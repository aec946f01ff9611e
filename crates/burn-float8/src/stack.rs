//! [`Float8Stack`]: a [`Float8`] backend with or without autodiff.
use std::sync::Arc;

use burn_backend::Backend;
use burn_backend::tensor::{Device, FloatTensor};

use crate::backend::{DeviceMemory, Float8Backend};
use crate::layer::{Layer, Tag, untagged};
use crate::ops::{Float8, functions};
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
pub trait Float8Stack: Backend + sealed::Sealed {
    /// The compute backend.
    type Inner: Float8Backend<Device = Self::Device>;

    /// Device memory held by the compute backend, if it counts that (CubeCL).
    fn device_memory(device: &Device<Self>) -> Option<DeviceMemory> {
        Self::Inner::fp8_device_memory(device)
    }
    /// Tags this tensor as the weight of a layer.
    #[doc(hidden)]
    #[allow(private_interfaces)]
    fn with_tag(tensor: FloatTensor<Self>, tag: Tag) -> FloatTensor<Self>;
    /// Replaces the value and tag of this leaf with the result of `f`.
    #[doc(hidden)]
    fn map_float8(
        tensor: FloatTensor<Self>,
        f: impl FnOnce(Float8Tensor<Self::Inner>) -> Float8Tensor<Self::Inner>,
    ) -> FloatTensor<Self>;
    /// Tag of this weight: its layer and stamp.
    #[doc(hidden)]
    #[allow(private_interfaces)]
    fn tag(tensor: &FloatTensor<Self>) -> Option<Tag>;
    /// Layer of this weight.
    fn layer(tensor: &FloatTensor<Self>) -> Option<Arc<Layer>> {
        Self::tag(tensor).map(|tag| tag.layer)
    }
    /// This tensor below autodiff.
    #[doc(hidden)]
    fn float8_tensor(tensor: &FloatTensor<Self>) -> Float8Tensor<Self::Inner>;
    /// Whether this weight has adapters.
    #[doc(hidden)]
    fn has_adapter(tensor: &FloatTensor<Self>) -> bool;
    /// Layer of all untagged weights of a device.
    fn untagged_layer(device: &Device<Self>) -> Arc<Layer> {
        untagged::<Self::Inner>(device)
    }
    /// Registers the functions of the backend, before a model calls them.
    #[doc(hidden)]
    fn register();
}

impl<W: Wrapped> Float8Stack for Float8<W> {
    type Inner = W::Plain;

    #[allow(private_interfaces)]
    fn with_tag(tensor: FloatTensor<Self>, tag: Tag) -> FloatTensor<Self> {
        tensor.tagged(tag)
    }

    fn map_float8(
        tensor: FloatTensor<Self>,
        f: impl FnOnce(Float8Tensor<W::Plain>) -> Float8Tensor<W::Plain>,
    ) -> FloatTensor<Self> {
        let new = f(tensor.plain());
        new.map(|value| W::replace(tensor.full().clone(), value))
    }

    #[allow(private_interfaces)]
    fn tag(tensor: &FloatTensor<Self>) -> Option<Tag> {
        tensor.tag().cloned()
    }

    fn float8_tensor(tensor: &FloatTensor<Self>) -> Float8Tensor<W::Plain> {
        tensor.plain()
    }

    fn has_adapter(tensor: &FloatTensor<Self>) -> bool {
        tensor.adapters().is_some()
    }

    fn register() {
        functions::register::<W>();
    }
}
