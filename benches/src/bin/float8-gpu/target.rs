//! A CubeCL runtime and the Burn backend on top of it.

use burn::tensor::DType;
use burn::tensor::backend::Backend;
use burn_float8::backend::Float8Backend;
use cubecl::prelude::*;

/// Where the program runs.
pub trait Target {
    /// The runtime of the kernels.
    type Runtime: Runtime;
    /// The backend of the linears, as Burn's users have it: with fusion.
    type Backend: Float8Backend;

    /// The default device's client, the one that the backend uses too.
    fn client() -> ComputeClient<Self::Runtime>;

    /// bf16, or f32 where the device has none.
    fn compute_dtype() -> DType {
        let device = Default::default();
        if Self::Backend::fp8_facts(&device).supports(DType::BF16) { DType::BF16 } else { DType::F32 }
    }

    /// Drains the backend's queues and waits for the device.
    fn sync() {
        Self::Backend::sync(&Default::default()).expect("the device runs");
    }
}

/// Burn's `Cuda`.
pub struct OnCuda;

/// Burn's `Wgpu`.
pub struct OnWgpu;

impl Target for OnCuda {
    type Runtime = cubecl::cuda::CudaRuntime;
    type Backend = burn::backend::Cuda;

    fn client() -> ComputeClient<Self::Runtime> {
        Self::Runtime::client(&Default::default())
    }
}

impl Target for OnWgpu {
    type Runtime = cubecl::wgpu::WgpuRuntime;
    type Backend = burn::backend::Wgpu;

    fn client() -> ComputeClient<Self::Runtime> {
        Self::Runtime::client(&Default::default())
    }
}
