//! What is not to be launched on a device again, since it was found to be wrong there, and what takes its place.
//!
//! ```text
//! GEMM   the path of the device → f16 mma → emulated → none
//! cast   cvt to FP8 → PTX without it → no PTX → none
//! ```

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{PoisonError, RwLock};

use cubecl::prelude::*;

use crate::ptx::cvt::Isa;
use crate::{GemmPath, Granularity};

/// Something to be avoided.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Struck {
    Gemm(GemmPath, [Granularity; 2]),
    Casts(Isa),
}

/// By device.
static STRUCK: RwLock<Vec<(usize, Struck)>> = RwLock::new(vec![]);

/// Their number, so that nobody takes the lock while there are none.
static COUNT: AtomicU64 = AtomicU64::new(0);

/// The same number for all clients of one device, and no others: the address of what its server has said of it.
pub fn device_key<R: Runtime>(client: &ComputeClient<R>) -> usize {
    core::ptr::from_ref(client.properties()).addr()
}

/// How often something was struck off, on any device: while it stays, [`gemm_path`](crate::gemm_path) gives the same answers.
pub fn strikes() -> u64 {
    COUNT.load(Ordering::Acquire)
}

/// From here on GEMMs of such operands take another path on this device than this one.
pub fn strike_gemm<R: Runtime>(client: &ComputeClient<R>, path: GemmPath, granularities: [Granularity; 2]) {
    strike(client, Struck::Gemm(path, granularities));
}

/// From here on casts on this device do without the newest of the instructions that they use.
pub fn strike_casts<R: Runtime>(client: &ComputeClient<R>) {
    if let Some(isa) = Isa::left(client) {
        strike(client, Struck::Casts(isa));
    }
}

/// The newest of the instructions that casts on this device use; `None` if all were struck off, so that nothing is cast there.
pub fn cast_instructions<R: Runtime>(client: &ComputeClient<R>) -> Option<&'static str> {
    Isa::left(client).map(|isa| match isa {
        Isa::PtxFp8 => "cvt to FP8",
        Isa::Ptx => "PTX",
        Isa::Portable => "integers",
    })
}

fn strike<R: Runtime>(client: &ComputeClient<R>, what: Struck) {
    STRUCK.write().unwrap_or_else(PoisonError::into_inner).push((device_key(client), what));
    COUNT.fetch_add(1, Ordering::AcqRel);
}

pub(crate) fn is_struck<R: Runtime>(client: &ComputeClient<R>, what: Struck) -> bool {
    strikes() > 0 && STRUCK.read().unwrap_or_else(PoisonError::into_inner).contains(&(device_key(client), what))
}
