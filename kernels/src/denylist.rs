//! Per-device denylist of failed kernels: GEMM paths, cast instructions and fused operations.

use std::any::TypeId;
use std::collections::BTreeMap;
use std::hash::{BuildHasher, BuildHasherDefault, DefaultHasher, Hash};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{PoisonError, RwLock};

use cubecl::prelude::*;

/// Disabled kernels of each device.
static DISABLED: RwLock<BTreeMap<usize, Disabled>> = RwLock::new(BTreeMap::new());

/// Whether [`DISABLED`] has an entry. While it has none, its lock is not taken.
static IS_ANY: AtomicBool = AtomicBool::new(false);

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
        if !IS_ANY.load(Ordering::Acquire) {
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

/// Disables a kernel on a device.
pub(crate) fn disable<R: Runtime>(client: &ComputeClient<R>, what: impl Hash + 'static) {
    DISABLED.write().unwrap_or_else(PoisonError::into_inner).entry(device_key(client)).or_default().add(what);
    IS_ANY.store(true, Ordering::Release);
}

/// Whether a kernel is disabled on a device.
pub(crate) fn is_disabled<R: Runtime>(client: &ComputeClient<R>, what: impl Hash + 'static) -> bool {
    Disabled::on(device_key(client)).contains(what)
}
