//! [`Float8Stack`]: a stack of backends with a [`Float8`] in it, with autodiff or without.
use burn_autodiff::Autodiff;
use burn_autodiff::checkpoint::strategy::CheckpointStrategy;
use burn_backend::Backend;
use burn_backend::tensor::{Device, FloatTensor, IntTensor};

use crate::backend::Float8Backend;
use crate::config::{Float8Config, Policy, ScalingType};
use crate::error::Float8Error;
use crate::layer::{Layer, Tag, set_default, untagged};
use crate::ops::{Float8, grouped, linear, linear_saved};
use crate::tensor::Float8Tensor;
use crate::terms::{Operand, Reason};
use std::sync::Arc;

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
    /// The same tensor as the weight of a layer.
    #[doc(hidden)]
    #[allow(private_interfaces)]
    fn with_tag(tensor: FloatTensor<Self>, tag: Tag) -> FloatTensor<Self>;
    /// The layer whose weight this is, and when it was built.
    #[doc(hidden)]
    #[allow(private_interfaces)]
    fn tag(tensor: &FloatTensor<Self>) -> Option<Tag>;
    /// The layer whose weight this is.
    fn layer(tensor: &FloatTensor<Self>) -> Option<Arc<Layer>> {
        Self::tag(tensor).map(|tag| tag.layer)
    }
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

    #[allow(private_interfaces)]
    fn tag(tensor: &FloatTensor<Self>) -> Option<Tag> {
        Float8Tensor::tag(tensor).cloned()
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

    #[allow(private_interfaces)]
    fn tag(tensor: &FloatTensor<Self>) -> Option<Tag> {
        Float8::<B>::tag(&tensor.primitive)
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
}

/// Sets how linears run on this device whose weights were not tagged by [`Float8Config::apply`]; `None` turns FP8 off
/// for them. Filters, overrides and statistics do not apply, since an untagged linear has no name. A configuration that says
/// what [`untagged`](Float8Config::untagged) linears do comes first.
///
/// # Errors
///
/// As [`Float8LinearConfig::validate`](crate::Float8LinearConfig::validate);
/// [`Float8Error::DelayedWithoutLayers`]: an amax history belongs to a layer.
pub fn set_default_config<B: Float8Stack>(
    device: &Device<B>,
    config: Option<&Float8Config>,
) -> Result<(), Float8Error> {
    let policy = match config {
        Some(Float8Config { linear, .. }) => {
            linear.validate()?;
            let casts = linear.casts();
            if Operand::ALL.into_iter().any(|operand| casts.of(operand).scaling_type == ScalingType::Delayed) {
                return Err(Float8Error::DelayedWithoutLayers);
            }
            Policy::Float8(linear.clone())
        }
        None => Policy::HighPrecision(Reason::Off),
    };
    set_default::<B::Inner>(&B::inner_device(device), policy);
    Ok(())
}
