//! `Float8<Autodiff<B>>` as the training backend. `Float8<B>` is its inner backend.
use burn_autodiff::Autodiff;
use burn_autodiff::checkpoint::strategy::CheckpointStrategy;
use burn_autodiff::grads::Gradients;
use burn_backend::AutodiffBackend;
#[cfg(feature = "distributed")]
use burn_backend::distributed::{DistributedBackend, DistributedParamId, DistributedParams};
use burn_backend::tensor::{BoolTensor, FloatTensor, IntTensor, QuantizedTensor};

use super::Float8;
use crate::backend::Float8Backend;
use crate::layer::Mark;
use crate::tensor::{Float8Tensor, Wrapped};

/// Gradient of a parameter, marked with its layer if the parameter is a shard or a part of a weight.
fn gradient<B: Float8Backend, W: Wrapped<Plain = B>>(
    of: &Float8Tensor<W>,
    gradient: FloatTensor<B>,
) -> Float8Tensor<B> {
    let layer = of.divided().or_else(|| of.layer().filter(|layer| layer.parallel().is_some()));
    Float8Tensor::new(gradient).with_mark(layer.cloned().map(Mark::ShardGradient))
}

macro_rules! autodiff_backend {
    ($($bound:ident)? { $($distributed:tt)* }) => {
        impl<B: Float8Backend $(+ $bound)?, C: CheckpointStrategy> AutodiffBackend for Float8<Autodiff<B, C>> {
            type InnerBackend = Float8<B>;
            type Gradients = Gradients;

            fn backward(tensor: FloatTensor<Self>) -> Gradients {
                Autodiff::<B, C>::backward(tensor.into_full())
            }
            fn grad(tensor: &FloatTensor<Self>, grads: &Gradients) -> Option<Float8Tensor<B>> {
                Autodiff::<B, C>::grad(tensor.full(), grads).map(|grad| gradient(tensor, grad))
            }
            fn grad_remove(tensor: &FloatTensor<Self>, grads: &mut Gradients) -> Option<Float8Tensor<B>> {
                Autodiff::<B, C>::grad_remove(tensor.full(), grads).map(|grad| gradient(tensor, grad))
            }
            fn grad_replace(tensor: &FloatTensor<Self>, grads: &mut Gradients, grad: Float8Tensor<B>) {
                Autodiff::<B, C>::grad_replace(tensor.full(), grads, grad.into_full())
            }
            fn inner(tensor: FloatTensor<Self>) -> Float8Tensor<B> {
                tensor.map(Autodiff::<B, C>::inner)
            }
            fn from_inner(tensor: Float8Tensor<B>) -> FloatTensor<Self> {
                tensor.map(Autodiff::<B, C>::from_inner)
            }
            fn int_inner(tensor: IntTensor<Self>) -> IntTensor<Float8<B>> {
                tensor
            }
            fn int_from_inner(tensor: IntTensor<Float8<B>>) -> IntTensor<Self> {
                tensor
            }
            fn bool_inner(tensor: BoolTensor<Self>) -> BoolTensor<Float8<B>> {
                tensor
            }
            fn bool_from_inner(tensor: BoolTensor<Float8<B>>) -> BoolTensor<Self> {
                tensor
            }
            fn q_inner(tensor: QuantizedTensor<Self>) -> QuantizedTensor<Float8<B>> {
                tensor
            }
            fn q_from_inner(tensor: QuantizedTensor<Float8<B>>) -> QuantizedTensor<Self> {
                tensor
            }
            $($distributed)*
        }
    };
}

#[cfg(not(feature = "distributed"))]
autodiff_backend!({});

// With this feature, Burn's Autodiff only trains on backends that reduce gradients between devices.
#[cfg(feature = "distributed")]
autodiff_backend!(DistributedBackend {
    fn set_distributed_params(tensor: FloatTensor<Self>, id: DistributedParamId) -> FloatTensor<Self> {
        tensor.map(|tensor| Autodiff::<B, C>::set_distributed_params(tensor, id))
    }
    fn distributed_params(tensor: &FloatTensor<Self>) -> Option<DistributedParams> {
        Autodiff::<B, C>::distributed_params(tensor.full())
    }
    fn is_distributed(tensor: &FloatTensor<Self>) -> bool {
        Autodiff::<B, C>::is_distributed(tensor.full())
    }
});
