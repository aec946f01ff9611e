//! [`Applied`]: data shared by the layers of one applied configuration.
use std::any::{Any, TypeId};
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};

use burn_backend::DeviceId;
use parking_lot::Mutex;

use crate::config::Float8Config;

type DeviceStates = HashMap<(TypeId, DeviceId), Arc<dyn Any + Send + Sync>>;

/// Settings of one [`Float8Config::apply`], and the data its layers share on each device.
#[derive(Default)]
pub(crate) struct Applied {
    /// Unique in the process.
    pub(crate) number: AppliedNumber,
    pub(crate) config: Float8Config,
    /// Linears that were quantized at that time.
    quantized: Vec<String>,
    /// Whether steps begin only by `begin_float8_step`.
    manual_steps: AtomicBool,
    states: Mutex<DeviceStates>,
}

/// Identifies an applied configuration, even after it is dropped.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct AppliedNumber(u64);

impl Default for AppliedNumber {
    fn default() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        Self(NEXT.fetch_add(1, Relaxed))
    }
}

impl Applied {
    pub(crate) fn new(config: Float8Config, quantized: Vec<String>) -> Self {
        Self { config, quantized, ..Self::default() }
    }

    /// Whether a linear was quantized when the configuration was applied, and therefore skipped.
    pub(crate) fn was_quantized(&self, linear: &str) -> bool {
        self.quantized.iter().any(|name| name == linear)
    }

    pub(crate) fn has_manual_steps(&self) -> bool {
        self.manual_steps.load(Relaxed)
    }

    pub(crate) fn set_manual_steps(&self) {
        self.manual_steps.store(true, Relaxed);
    }

    /// Data that the layers share on a device, created by the first call.
    pub(crate) fn state<T: Any + Default + Send + Sync>(&self, device: DeviceId) -> Arc<T> {
        let key = (TypeId::of::<T>(), device);
        let state = self.states.lock().entry(key).or_insert_with(|| Arc::new(T::default())).clone();
        state.downcast().expect("keyed by its type")
    }
}
