//! Burn's data-parallel training: the wrapped backend reduces gradients. `Autodiff` requires this
//! with the feature `distributed`.
use burn_backend::DeviceId;
use burn_backend::distributed::{
    CollectiveTensor, DistributedBackend, DistributedConfig, DistributedParams, ReduceOperation, TensorRef,
};
use burn_backend::tensor::{Device, FloatTensor};

use super::Float8;
use crate::tensor::{Float8Tensor, Wrapped};

impl<W: Wrapped + DistributedBackend> DistributedBackend for Float8<W> {
    fn start_communication_server(devices: &[Self::Device], config: DistributedConfig) {
        W::start_communication_server(devices, config);
    }

    fn close_communication_server(device: &Self::Device) {
        W::close_communication_server(device);
    }

    fn register_sync_parameters(device: &Self::Device, parameters: Vec<DistributedParams>) {
        W::register_sync_parameters(device, parameters);
    }

    fn submit_sync_collective(device: &Self::Device) {
        W::submit_sync_collective(device);
    }

    fn submit_gradient_sync(tensor: TensorRef<Self>, parameters: DistributedParams) {
        // SAFETY: the caller's tensor, and with it the wrapped tensor, lives until the collective
        // is over.
        let full = unsafe { (*tensor.0).full_mut() };
        W::submit_gradient_sync(TensorRef(full), parameters);
    }

    fn all_reduce(tensor: FloatTensor<Self>, op: ReduceOperation, device_ids: Vec<DeviceId>) -> CollectiveTensor<Self> {
        let reduced = W::all_reduce(tensor.into_full(), op, device_ids);
        // SAFETY: it is wrapped as unresolved again, and `sync_collective` forwards to `W`.
        CollectiveTensor::new(Float8Tensor::new(unsafe { reduced.assume_resolved() }))
    }

    fn sync_collective(device: &Device<Self>) {
        W::sync_collective(device);
    }
}

/// Compiles only if Burn can train with this stack.
#[cfg(feature = "cuda")]
const _: () = {
    const fn is_autodiff<B: burn_backend::AutodiffBackend>() {}
    is_autodiff::<Float8<burn_autodiff::Autodiff<burn::backend::Cuda>>>();
};
