//! CubeCL runtimes with the Burn backends on top of them.

use burn::tensor::DType;
use burn::tensor::backend::Backend;
use burn_float8::backend::Float8Backend;
use cubecl::prelude::*;

/// Runtime and backend to measure.
pub trait Target {
    /// Runtime of the kernels.
    type Runtime: Runtime;
    /// Backend of the linears, with fusion, as users have it.
    type Backend: Float8Backend;

    /// Client of the default device, which the backend uses too.
    fn client() -> ComputeClient<Self::Runtime>;

    /// bf16, or f32 if the device does not support it.
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
