//! Detects a client's CUDA architecture from the features that CubeCL reports.

use cubecl::features::{Tma, TypeUsage};
use cubecl::ir::{ElemType, FloatKind, StorageType};
use cubecl::prelude::*;

/// CUDA architectures with separate kernels. Each includes the later ones up to the next.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum CudaArch {
    /// Ampere: f16 tensor cores and asynchronous copies.
    Sm80,
    /// Ada: FP8 tensor cores through `mma.sync`.
    Sm89,
    /// Hopper: FP8 tensor cores through `wgmma`, and TMA.
    Sm90,
    /// Data-center Blackwell: `tcgen05`.
    Sm100,
    /// Workstation Blackwell: FP8 tensor cores through `mma.sync`, also block-scaled.
    Sm120,
}

/// Architecture of this client's device. `None` if it is not a CUDA device or is older than Ampere.
pub fn cuda_arch<R: Runtime>(client: &ComputeClient<R>) -> Option<CudaArch> {
    if R::name(client) != "cuda" {
        return None;
    }
    let features = &client.properties().features;
    let converts = |kind| {
        let usage = features.type_usage(StorageType::Scalar(ElemType::Float(kind)));
        usage.contains(TypeUsage::Conversion)
    };
    if !features.matmul.scaled_mma.is_empty() {
        Some(CudaArch::Sm120)
    } else if converts(FloatKind::UE8M0) {
        Some(CudaArch::Sm100)
    } else if features.tma.contains(Tma::Base) {
        Some(CudaArch::Sm90)
    } else if converts(FloatKind::E4M3) {
        Some(CudaArch::Sm89)
    } else {
        features.copy_async.then_some(CudaArch::Sm80)
    }
}
