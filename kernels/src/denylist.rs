//! Per-device denylist of failed kernels: paths of GEMMs, instructions of casts, and fused operations.

use std::any::TypeId;
use std::hash::{BuildHasher, BuildHasherDefault, DefaultHasher, Hash};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{PoisonError, RwLock};

use cubecl::prelude::*;

/// Devices, and hashes of what is disabled there.
static DISABLED: RwLock<Vec<(usize, u64)>> = RwLock::new(vec![]);

/// Their number, so that the lock is not taken while there are none.
static COUNT: AtomicU64 = AtomicU64::new(0);

/// A number that all clients of one device have, and no others: the address of its server's properties.
pub fn device_key<R: Runtime>(client: &ComputeClient<R>) -> usize {
    core::ptr::from_ref(client.properties()).addr()
}

/// Number of disabled kernels, on all devices. While it is constant, so is [`gemm_path`](crate::gemm_path).
pub fn disabled_count() -> u64 {
    COUNT.load(Ordering::Acquire)
}

fn key<R: Runtime, T: Hash + 'static>(client: &ComputeClient<R>, what: T) -> (usize, u64) {
    let hash = BuildHasherDefault::<DefaultHasher>::default().hash_one((TypeId::of::<T>(), what));
    (device_key(client), hash)
}

/// Disables this on the device.
pub(crate) fn disable<R: Runtime>(client: &ComputeClient<R>, what: impl Hash + 'static) {
    DISABLED.write().unwrap_or_else(PoisonError::into_inner).push(key(client, what));
    COUNT.fetch_add(1, Ordering::AcqRel);
}

/// Whether this is disabled on the device.
pub(crate) fn is_disabled<R: Runtime>(client: &ComputeClient<R>, what: impl Hash + 'static) -> bool {
    disabled_count() > 0 && DISABLED.read().unwrap_or_else(PoisonError::into_inner).contains(&key(client, what))
}
