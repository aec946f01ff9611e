//! What is not to be used on a device again, since it was found to be wrong there. Paths of GEMMs and instructions of casts ask here
//! before they are chosen.

use std::any::TypeId;
use std::hash::Hash;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{PoisonError, RwLock};

use cubecl::prelude::*;

use crate::launched::hash_of;

/// Devices, and hashes of what was struck off there.
static STRUCK: RwLock<Vec<(usize, u64)>> = RwLock::new(vec![]);

/// Their number, so that nobody takes the lock while there are none.
static COUNT: AtomicU64 = AtomicU64::new(0);

/// A number that all clients of one device have, and no others: the address of what its server has said of it.
pub fn device_key<R: Runtime>(client: &ComputeClient<R>) -> usize {
    core::ptr::from_ref(client.properties()).addr()
}

/// How often something was struck off, on any device: while it stays, [`gemm_path`](crate::gemm_path) gives the same answers.
pub fn strikes() -> u64 {
    COUNT.load(Ordering::Acquire)
}

fn key<R: Runtime, T: Hash + 'static>(client: &ComputeClient<R>, what: T) -> (usize, u64) {
    (device_key(client), hash_of((TypeId::of::<T>(), what)))
}

/// This is not used on the device from here on.
pub(crate) fn strike<R: Runtime>(client: &ComputeClient<R>, what: impl Hash + 'static) {
    STRUCK.write().unwrap_or_else(PoisonError::into_inner).push(key(client, what));
    COUNT.fetch_add(1, Ordering::AcqRel);
}

/// Whether this is not to be used on the device.
pub(crate) fn is_struck<R: Runtime>(client: &ComputeClient<R>, what: impl Hash + 'static) -> bool {
    strikes() > 0 && STRUCK.read().unwrap_or_else(PoisonError::into_inner).contains(&key(client, what))
}
