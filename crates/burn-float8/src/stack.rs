//! [`Float8Stack`]: a stack of backends with a [`Float8`] in it, with autodiff or without.
use std::sync::Arc;

use burn_autodiff::Autodiff;
use burn_autodiff::checkpoint::strategy::CheckpointStrategy;
use burn_backend::Backend;
use burn_backend::tensor::{Device, FloatTensor, IntTensor};

use crate::backend::{DeviceMemory, Float8Backend};
use crate::layer::{Layer, Tag, untagged};
use crate::ops::functions::{self, Functions};
use crate::ops::{Float8, full_tensor, grouped, linear, linear_saved};
use crate::tensor::Float8Tensor;

mod sealed {
    pub trait Sealed {}
}
impl<B: Float8Backend> sealed::Sealed for Float8<B> {}
impl<B: Float8Backend, C: CheckpointStrategy> sealed::Sealed for Autodiff<Float8<B>, C> {}

/// A stack of backends with a [`Float8`] in it: `Float8<B>` itself, or `Autodiff<Float8<B>>`.
pub trait Float8Stack: Backend + sealed::Sealed {
    /// The backend that [`Float8`] wraps.
    type Inner: Float8Backend;

    /// The same device.
    #[doc(hidden)]
    fn inner_device(device: &Device<Self>) -> Device<Self::Inner>;
    /// What the wrapped backend holds of the device's memory, if it counts that: CubeCL does.
    fn device_memory(device: &Device<Self>) -> Option<DeviceMemory> {
        Self::Inner::fp8_device_memory(&Self::inner_device(device))
    }
    /// The same tensor as the weight of a layer.
    #[doc(hidden)]
    #[allow(private_interfaces)]
    fn with_tag(tensor: FloatTensor<Self>, tag: Tag) -> FloatTensor<Self>;
    /// The same leaf with another value.
    #[doc(hidden)]
    fn map_float8(
        tensor: FloatTensor<Self>,
        f: impl FnOnce(Float8Tensor<Self::Inner>) -> Float8Tensor<Self::Inner>,
    ) -> FloatTensor<Self>;
    /// The layer whose weight this is, and when it was built.
    #[doc(hidden)]
    #[allow(private_interfaces)]
    fn tag(tensor: &FloatTensor<Self>) -> Option<Tag> {
        Self::float8_tensor(tensor).tag().cloned()
    }
    /// The layer whose weight this is.
    fn layer(tensor: &FloatTensor<Self>) -> Option<Arc<Layer>> {
        Self::tag(tensor).map(|tag| tag.layer)
    }
    /// The same tensor below autodiff.
    #[doc(hidden)]
    fn float8_tensor(tensor: &FloatTensor<Self>) -> &Float8Tensor<Self::Inner>;
    /// See [`linear`](crate::linear()).
    #[doc(hidden)]
    fn linear_saved(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        bias: Option<FloatTensor<Self>>,
    ) -> FloatTensor<Self>;
    /// See [`grouped_linear`](crate::grouped_linear).
    #[doc(hidden)]
    fn grouped_linear(x: FloatTensor<Self>, weight: FloatTensor<Self>, ends: IntTensor<Self>) -> FloatTensor<Self>;
    /// See [`full_tensor`](crate::full_tensor).
    #[doc(hidden)]
    fn full_tensor(weight: FloatTensor<Self>) -> FloatTensor<Self>;
    /// The layer that stands for all untagged weights of a device.
    fn untagged_layer(device: &Device<Self>) -> Arc<Layer> {
        untagged::<Self::Inner>(&Self::inner_device(device))
    }
}

impl<B: Float8Backend> Float8Stack for Float8<B> {
    type Inner = B;

    fn inner_device(device: &Device<Self>) -> Device<B> {
        device.clone()
    }

    #[allow(private_interfaces)]
    fn with_tag(tensor: FloatTensor<Self>, tag: Tag) -> FloatTensor<Self> {
        tensor.tagged(tag)
    }

    fn map_float8(tensor: FloatTensor<Self>, f: impl FnOnce(Float8Tensor<B>) -> Float8Tensor<B>) -> FloatTensor<Self> {
        f(tensor)
    }

    fn float8_tensor(tensor: &FloatTensor<Self>) -> &Float8Tensor<B> {
        tensor
    }

    fn linear_saved(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        bias: Option<FloatTensor<Self>>,
    ) -> FloatTensor<Self> {
        linear::forward(x, weight, bias)
    }

    fn grouped_linear(x: FloatTensor<Self>, weight: FloatTensor<Self>, ends: IntTensor<Self>) -> FloatTensor<Self> {
        grouped::forward(x, weight, ends)
    }

    fn full_tensor(weight: FloatTensor<Self>) -> FloatTensor<Self> {
        full_tensor::forward(weight)
    }
}

impl<B: Float8Backend, C: CheckpointStrategy> Float8Stack for Autodiff<Float8<B>, C> {
    type Inner = B;

    fn inner_device(device: &Device<Self>) -> Device<B> {
        device.clone()
    }

    #[allow(private_interfaces)]
    fn with_tag(mut tensor: FloatTensor<Self>, tag: Tag) -> FloatTensor<Self> {
        tensor.primitive = tensor.primitive.tagged(tag);
        tensor
    }

    fn map_float8(
        mut tensor: FloatTensor<Self>,
        f: impl FnOnce(Float8Tensor<B>) -> Float8Tensor<B>,
    ) -> FloatTensor<Self> {
        tensor.primitive = f(tensor.primitive);
        tensor
    }

    fn float8_tensor(tensor: &FloatTensor<Self>) -> &Float8Tensor<B> {
        &tensor.primitive
    }

    fn linear_saved(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        bias: Option<FloatTensor<Self>>,
    ) -> FloatTensor<Self> {
        linear_saved::forward_autodiff::<B, C>(x, weight, bias)
    }

    fn grouped_linear(x: FloatTensor<Self>, weight: FloatTensor<Self>, ends: IntTensor<Self>) -> FloatTensor<Self> {
        grouped::forward_autodiff::<B, C>(x, weight, ends)
    }

    fn full_tensor(weight: FloatTensor<Self>) -> FloatTensor<Self> {
        full_tensor::forward_autodiff::<B, C>(weight)
    }
}

/// Registers the functions of a stack whose checkpointing strategy is not one of Burn's.
pub(crate) fn register<B: Float8Stack>() {
    functions::register(Functions::<B> {
        linear: B::linear_saved,
        grouped_linear: B::grouped_linear,
        full_tensor: B::full_tensor,
    });
}
