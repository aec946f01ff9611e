//! Burn's data-parallel training: gradients are reduced by the wrapped backend. `Autodiff` asks for this where the feature
//! `distributed` is on.
use burn_backend::DeviceId;
use burn_backend::distributed::{CollectiveTensor, DistributedBackend, ReduceOperation};
use burn_backend::tensor::{Device, FloatTensor};

use super::Float8;
use crate::backend::Float8Backend;
use crate::tensor::Float8Tensor;

impl<B: Float8Backend + DistributedBackend> DistributedBackend for Float8<B> {
    fn all_reduce(tensor: FloatTensor<Self>, op: ReduceOperation, device_ids: Vec<DeviceId>) -> CollectiveTensor<Self> {
        let reduced = B::all_reduce(tensor.into_full(), op, device_ids);
        // SAFETY: it is wrapped as unresolved again, and `sync_collective` is that of `B`.
        CollectiveTensor::new(Float8Tensor::new(unsafe { reduced.assume_resolved() }))
    }

    fn sync_collective(device: &Device<Self>) {
        B::sync_collective(device);
    }
}

/// Compiles only if the stack is one that Burn trains with.
#[cfg(feature = "cuda")]
const _: () = {
    const fn is_autodiff<B: burn_backend::AutodiffBackend>() {}
    is_autodiff::<burn_autodiff::Autodiff<Float8<burn::backend::Cuda>>>();
};
