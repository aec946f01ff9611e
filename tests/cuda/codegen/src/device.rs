//! The runtime, and reexports for its devices and launches.

use cubecl_common::device::DeviceId;
use cubecl_core::Runtime;
use cubecl_core::ir::{ContiguousElements, MatrixLayout, MmaProperties, TargetProperties};
use cubecl_core::zspace::striding::has_pitched_row_major_strides;
use cubecl_core::zspace::{Shape, Strides};
use cubecl_cpp::cuda::mma::contiguous_elements_cuda;
use cubecl_runtime::client::ComputeClient;

pub use crate::compiler::CudaCompiler;
use crate::server::GenerateServer;
use crate::state::MAX_GRID;
pub use crate::state::{
    Execution, Generated, Idle, OfflineDevice, Running, RunningShared, execute, execute_shared, idle,
    max_shared_memory, on_each, sleep_longer, take, take_allocations, take_waits,
};

/// CubeCL's CUDA runtime up to NVRTC. Launches are executed only on request ([`execute`]).
#[derive(Clone, Debug)]
pub struct GenerateCuda;

impl Runtime for GenerateCuda {
    type Compiler = CudaCompiler;
    type Server = GenerateServer;
    type Device = OfflineDevice;

    fn client(device: &OfflineDevice) -> ComputeClient<Self> {
        sleep_longer();
        ComputeClient::load(device)
    }

    fn name(_: &ComputeClient<Self>) -> &'static str {
        "cuda"
    }

    fn require_array_lengths() -> bool {
        true
    }

    fn max_cube_count() -> (u32, u32, u32) {
        MAX_GRID
    }

    fn can_read_tensor(shape: &Shape, strides: &Strides) -> bool {
        has_pitched_row_major_strides(shape, strides)
    }

    fn target_properties() -> TargetProperties {
        TargetProperties {
            mma: MmaProperties {
                register_size_bits: 32,
                const_plane_size: 32,
                register_layout_a: MatrixLayout::RowMajor,
                register_layout_b: MatrixLayout::ColMajor,
                register_layout_acc: MatrixLayout::RowMajor,
                register_duplication_a: 1,
                register_duplication_b: 1,
                register_duplication_acc: 1,
                contiguous_elements: ContiguousElements::new(contiguous_elements_cuda),
            },
        }
    }

    fn enumerate_devices(_: u16, _: &()) -> Vec<DeviceId> {
        vec![]
    }
}
