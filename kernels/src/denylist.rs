//! Per-device denylist of failed kernels: GEMM paths, cast instructions and fused operations.

use std::any::TypeId;
use std::collections::BTreeMap;
use std::hash::{BuildHasher, BuildHasherDefault, DefaultHasher, Hash};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{PoisonError, RwLock};

use cubecl::prelude::*;

/// Disabled kernels of each device.
static DISABLED: RwLock<BTreeMap<usize, Disabled>> = RwLock::new(BTreeMap::new());

/// Number of entries of [`DISABLED`]. While it is 0, the lock is not taken.
static COUNT: AtomicUsize = AtomicUsize::new(0);

/// Key of a device: the address of its server's properties. Equal for all clients of one device and
/// different for others.
pub fn device_key<R: Runtime>(client: &ComputeClient<R>) -> usize {
    core::ptr::from_ref(client.properties()).addr()
}

/// Kernels that are disabled on one device, as hashes.
#[derive(Clone, Debug, Default)]
pub struct Disabled(Vec<u64>);

impl Disabled {
    /// Kernels that are now disabled on the device with this [`device_key`].
    pub fn on(device: usize) -> Self {
        if disabled_count() == 0 {
            return Self::default();
        }
        DISABLED.read().unwrap_or_else(PoisonError::into_inner).get(&device).cloned().unwrap_or_default()
    }

    /// Disables a kernel.
    pub(crate) fn add(&mut self, what: impl Hash + 'static) {
        self.0.push(hash(what));
    }

    /// Whether a kernel is disabled.
    pub(crate) fn contains(&self, what: impl Hash + 'static) -> bool {
        !self.0.is_empty() && self.0.contains(&hash(what))
    }
}

fn hash<T: Hash + 'static>(what: T) -> u64 {
    BuildHasherDefault::<DefaultHasher>::default().hash_one((TypeId::of::<T>(), what))
}

/// Number of kernels that this process has disabled, on all devices.
pub fn disabled_count() -> usize {
    COUNT.load(Ordering::Acquire)
}

/// Disables a kernel on a device.
pub(crate) fn disable<R: Runtime>(client: &ComputeClient<R>, what: impl Hash + 'static) {
    DISABLED.write().unwrap_or_else(PoisonError::into_inner).entry(device_key(client)).or_default().add(what);
    COUNT.fetch_add(1, Ordering::Release);
}

/// Whether a kernel is disabled on a device.
pub(crate) fn is_disabled<R: Runtime>(client: &ComputeClient<R>, what: impl Hash + 'static) -> bool {
    Disabled::on(device_key(client)).contains(what)
}
