//! Software Vulkan with wrong kernels.
use std::any::Any;
use std::sync::Arc;

use burn::tensor::TensorData;
use burn::tensor::ops::AttentionModuleOptions;
use burn_cubecl::CubeBackend;
use burn_float8::backend::Float8Backend;
use burn_float8::nn;
use burn_float8::{Float8Config, Float8Error, Recipe, report};
use cubecl::Runtime;
use cubecl::client::ComputeClient;
use cubecl::ir::TargetProperties;
use cubecl::wgpu::{AutoCompiler, WgpuDevice, WgpuRuntime, WgpuServer};
use cubecl::zspace::{Shape, Strides};
use cubecl_common::bytes::Bytes;
use cubecl_common::device::{DeviceId, DeviceService};
use cubecl_common::future::DynFut;
use cubecl_common::profile::ProfileDuration;
use cubecl_common::stream_id::StreamId;
use cubecl_runtime::allocator::ContiguousMemoryLayoutPolicy;
use cubecl_runtime::compiler::CubeTask;
use cubecl_runtime::logging::ServerLogger;
use cubecl_runtime::memory_management::{ManagedMemoryHandle, MemoryAllocationMode, MemoryUsage};
use cubecl_runtime::server::{
    Binding, ComputeServer, CopyDescriptor, CubeCount, ExecutionMode, KernelArguments, ProfileError, ProfilingToken,
    ServerCommunication, ServerError, ServerUtilities,
};
use cubecl_runtime::storage::{ComputeStorage, ManagedResource};
use test_data::relative_error;

use crate::support::process::alone;
use crate::support::runtime::has_wgpu;
use crate::{assert_high_precision, assert_right, layer, tensor};

type Storage = <WgpuServer as ComputeServer>::Storage;
type Resource = <Storage as ComputeStorage>::Resource;

/// wgpu that launches only the first cube of a GEMM, and no RMSNorm, SwiGLU or attention kernels.
#[derive(Clone, Debug)]
struct Faulty;

#[derive(Debug)]
struct FaultyServer {
    inner: WgpuServer,
    utilities: Arc<ServerUtilities<Self>>,
}

impl DeviceService for FaultyServer {
    fn init(id: DeviceId) -> Self {
        let inner = WgpuServer::init(id);
        let of = ComputeServer::utilities(&inner);
        let policy = ContiguousMemoryLayoutPolicy::new(of.properties.memory.alignment as usize);
        let utilities = ServerUtilities::new(of.properties.clone(), of.logger.clone(), of.info, policy);
        Self { inner, utilities: Arc::new(utilities) }
    }

    fn utilities(&self) -> Arc<dyn Any + Send + Sync> {
        self.utilities.clone()
    }
}

impl ServerCommunication for FaultyServer {
    const SERVER_COMM_ENABLED: bool = false;
}

impl ComputeServer for FaultyServer {
    type Kernel = Box<dyn CubeTask<AutoCompiler>>;
    type Storage = Storage;
    type MemoryLayoutPolicy = ContiguousMemoryLayoutPolicy;
    type Info = <WgpuServer as ComputeServer>::Info;

    unsafe fn launch(
        &mut self,
        kernel: Self::Kernel,
        count: CubeCount,
        arguments: KernelArguments,
        mode: ExecutionMode,
        stream: StreamId,
    ) {
        if ["rms_norm", "swiglu", "attention_"].iter().any(|name| kernel.name().contains(name)) {
            return;
        }
        let count = if kernel.name().contains("gemm_") { CubeCount::Static(1, 1, 1) } else { count };
        // SAFETY: the caller upholds the contract of `launch`.
        unsafe { self.inner.launch(kernel, count, arguments, mode, stream) }
    }

    fn logger(&self) -> Arc<ServerLogger> {
        self.inner.logger()
    }

    fn utilities(&self) -> Arc<ServerUtilities<Self>> {
        self.utilities.clone()
    }

    fn staging(&mut self, sizes: &[usize], stream: StreamId) -> Result<Vec<Bytes>, ServerError> {
        self.inner.staging(sizes, stream)
    }

    fn initialize_memory(&mut self, memory: ManagedMemoryHandle, size: u64, stream: StreamId) {
        self.inner.initialize_memory(memory, size, stream);
    }

    fn read(&mut self, descriptors: Vec<CopyDescriptor>, stream: StreamId) -> DynFut<Result<Vec<Bytes>, ServerError>> {
        self.inner.read(descriptors, stream)
    }

    fn write(&mut self, descriptors: Vec<(CopyDescriptor, Bytes)>, stream: StreamId) {
        self.inner.write(descriptors, stream);
    }

    fn sync(&mut self, stream: StreamId) -> DynFut<Result<(), ServerError>> {
        self.inner.sync(stream)
    }

    fn get_resource(&mut self, binding: Binding, stream: StreamId) -> Result<ManagedResource<Resource>, ServerError> {
        self.inner.get_resource(binding, stream)
    }

    fn flush(&mut self, stream: StreamId) -> Result<(), ServerError> {
        self.inner.flush(stream)
    }

    fn memory_usage(&mut self, stream: StreamId) -> Result<MemoryUsage, ServerError> {
        self.inner.memory_usage(stream)
    }

    fn memory_cleanup(&mut self, stream: StreamId) {
        self.inner.memory_cleanup(stream);
    }

    fn start_profile(&mut self, stream: StreamId) -> Result<ProfilingToken, ServerError> {
        self.inner.start_profile(stream)
    }

    fn end_profile(&mut self, stream: StreamId, token: ProfilingToken) -> Result<ProfileDuration, ProfileError> {
        self.inner.end_profile(stream, token)
    }

    fn allocation_mode(&mut self, mode: MemoryAllocationMode, stream: StreamId) {
        self.inner.allocation_mode(mode, stream);
    }
}

impl Runtime for Faulty {
    type Compiler = AutoCompiler;
    type Server = FaultyServer;
    type Device = WgpuDevice;

    fn client(device: &WgpuDevice) -> ComputeClient<Self> {
        ComputeClient::load(device)
    }

    fn name(_: &ComputeClient<Self>) -> &'static str {
        "wgpu<wgsl>"
    }

    fn max_cube_count() -> (u32, u32, u32) {
        WgpuRuntime::max_cube_count()
    }

    fn can_read_tensor(shape: &Shape, strides: &Strides) -> bool {
        WgpuRuntime::can_read_tensor(shape, strides)
    }

    fn target_properties() -> TargetProperties {
        WgpuRuntime::target_properties()
    }

    fn enumerate_devices(type_id: u16, info: &<FaultyServer as ComputeServer>::Info) -> Vec<DeviceId> {
        WgpuRuntime::enumerate_devices(type_id, info)
    }
}

/// Only the first rows and columns of the product are right. The host computes the step that has
/// begun, and later ones run in high precision.
#[test]
fn a_gemm_of_one_tile_ends_on_the_host() {
    if !has_wgpu() {
        return;
    }
    type Wrong = CubeBackend<Faulty, f32, i32, u32>;
    let device = WgpuDevice::default();
    for recipe in [Recipe::Tensorwise, Recipe::Mxfp8] {
        // A product of 64 by 64 is one tile, so the device passes the preflight.
        let layer = layer::<Wrong>(&Float8Config::new(recipe), &device).expect("the device computes");
        assert_right::<Wrong>(recipe, &layer, &device);
        let report = report(&layer);
        for (gemm, ran) in report.layers[0].gemms() {
            assert_eq!(ran.path.as_deref(), Some("host (self-check of emulated failed)"), "{gemm} in {recipe}");
        }
        let error = report.verify().expect_err("a kernel is wrong");
        assert!(matches!(&error, Float8Error::SelfCheck(_)), "{error}");
        assert_high_precision::<Wrong>(&layer, &device);
    }
}

/// Results of RMSNorm, SwiGLU, rotary positions and attention, and a gradient through all of them.
fn fused<B: Float8Backend>(device: &B::Device) -> Vec<f32> {
    let x = tensor::<B, 3>(1, [2, 1000, 256], device).require_grad();
    let [cos, sin] = [3, 4].map(|seed| tensor::<B, 2>(seed, [1000, 32], device));
    let h = nn::rms_norm(x.clone(), tensor::<B, 1>(2, [256], device), 1e-5);
    let turned = nn::rotary(h.clone().reshape([2, 1000, 4, 64]), cos, sin);
    let y = nn::swiglu(h, x.clone() * 0.5);
    let short = turned.clone().slice_dim(2, 0..100);
    let attended = nn::attention(short.clone(), short.clone(), short, None, AttentionModuleOptions::default());
    let grads = (y.clone().sum() + turned.clone().sum() + attended.clone().powf_scalar(2.0).sum()).backward();
    let values = |data: TensorData| data.to_vec::<f32>().expect("f32");
    let gradient = x.grad(&grads).expect("tracked").into_data();
    [y.inner().into_data(), turned.inner().into_data(), attended.inner().into_data(), gradient].map(values).concat()
}

/// Burn's operations replace wrong fused kernels. Correct kernels stay in use.
#[test]
fn wrong_fused_kernels_end_in_burns_operations() {
    if !has_wgpu() {
        return;
    }
    // A software adapter has attention's kernels only on request, which a process reads once.
    let name = "wrong_fused_kernels_end_in_burns_operations";
    alone(module_path!(), name, &[("FLOAT8_ATTENTION", "tiles")], fused_kernels_fail);
}

fn fused_kernels_fail() {
    type Wrong = CubeBackend<Faulty, f32, i32, u32>;
    let device = WgpuDevice::default();
    let config = Float8Config::new(Recipe::Tensorwise);
    let layer = layer::<Wrong>(&config, &device).expect("the device computes");
    let got = fused::<Wrong>(&device);
    // Again, now that the wrong kernels are not launched any more.
    assert_eq!(got, fused::<Wrong>(&device));
    let want = fused::<burn::backend::Flex>(&Default::default());
    assert!(relative_error(&got, &want) < 1e-5);
    let report = report(&layer);
    let calls: Vec<_> = report.self_check.failures.iter().map(|failure| &failure.call).collect();
    for kernel in ["RmsNorm of", "RmsNorm backward", "SwiGlu of", "attention by tiles of"] {
        assert!(calls.iter().any(|call| call.starts_with(kernel)), "{calls:?}");
    }
    assert!(!calls.iter().any(|call| call.contains("Rotary")), "{calls:?}");
}
