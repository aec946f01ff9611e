//! [`Version`]: separates kernels of other crate versions and other devices in CubeCL's cache.

use cubecl::prelude::*;

use crate::arch::{CudaArch, cuda_arch};

/// Argument of every kernel. CubeCL's cache of compiled kernels outlives the program, and only keys
/// a kernel by its name and compile-time arguments.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Version {
    /// Hash of this crate's sources.
    sources: &'static str,
    /// CUDA architecture, bytes of shared memory, and SMs. The latter two distinguish devices with
    /// the same features: code for sm_100a does not run on sm_103, nor code for sm_86 on sm_80.
    device: Option<(CudaArch, usize, Option<u32>)>,
}

impl Version {
    /// Argument for this client's device.
    pub(crate) fn of<R: Runtime>(client: &ComputeClient<R>) -> Self {
        let hardware = &client.properties().hardware;
        let device = |arch| (arch, hardware.max_shared_memory_size, hardware.num_streaming_multiprocessors);
        Self { sources: env!("FLOAT8_KERNELS_SOURCE"), device: cuda_arch(client).map(device) }
    }
}
