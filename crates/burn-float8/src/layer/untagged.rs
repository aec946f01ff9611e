//! The layers that stand for linears whose weights carry none, one for each device, and what such linears do.
use std::any::TypeId;
use std::collections::HashMap;
use std::sync::{Arc, LazyLock, Weak};

use burn_backend::tensor::Device;
use burn_backend::{DeviceId, DeviceOps};
use parking_lot::Mutex;

use super::{Conversion, Layer};
use crate::backend::Float8Backend;
use crate::config::{Policy, Untagged};

/// The name under which reports list the linears whose weights carry no layer.
pub const UNTAGGED_NAME: &str = "(untagged)";

#[derive(Clone)]
struct DeviceDefault {
    layer: Arc<Layer>,
    /// Whether `set_default_config` was called.
    is_set: bool,
}

#[derive(Default)]
struct Registry {
    defaults: HashMap<(TypeId, DeviceId), DeviceDefault>,
    /// Whether any configuration was ever applied.
    has_applied: bool,
    /// Those that say what untagged linears do.
    conversions: Vec<Weak<Conversion>>,
}

static REGISTRY: LazyLock<Mutex<Registry>> = LazyLock::new(Mutex::default);

impl Registry {
    fn default<B: Float8Backend>(&mut self, device: &Device<B>) -> &mut DeviceDefault {
        self.defaults.entry((TypeId::of::<B>(), device.id())).or_insert_with(|| {
            let policy = Policy::Float8(Default::default());
            let layer = Arc::new(Layer::new(UNTAGGED_NAME, policy, Arc::default()));
            DeviceDefault { layer, is_set: false }
        })
    }

    /// What live configurations say; none if there is none that says so.
    fn choice(&mut self) -> Option<Untagged> {
        self.conversions.retain(|conversion| conversion.strong_count() > 0);
        let choices = self.conversions.iter().filter_map(|conversion| conversion.upgrade()?.config().untagged);
        choices.max()
    }
}

/// The device's layer for untagged weights.
pub(crate) fn untagged<B: Float8Backend>(device: &Device<B>) -> Arc<Layer> {
    REGISTRY.lock().default::<B>(device).layer.clone()
}

/// Sets the policy of the device's untagged linears.
pub(crate) fn set_default<B: Float8Backend>(device: &Device<B>, policy: Policy) {
    let mut registry = REGISTRY.lock();
    let default = registry.default::<B>(device);
    default.layer.configure(policy);
    default.is_set = true;
}

/// Notes that a configuration was applied.
pub(crate) fn note_apply(conversion: &Arc<Conversion>) {
    let mut registry = REGISTRY.lock();
    registry.has_applied = true;
    let is_known = |known: &Weak<Conversion>| core::ptr::eq(known.as_ptr(), Arc::as_ptr(conversion));
    if conversion.config().untagged.is_some() && !registry.conversions.iter().any(is_known) {
        registry.conversions.push(Arc::downgrade(conversion));
    }
}

/// What untagged linears of a device do now, and whether a configuration says so.
pub(crate) fn untagged_choice<B: Float8Backend>(device: &Device<B>) -> (Untagged, bool) {
    let mut registry = REGISTRY.lock();
    match registry.choice() {
        Some(choice) => (choice, true),
        None if registry.has_applied && !registry.default::<B>(device).is_set => (Untagged::HighPrecision, false),
        None => (Untagged::Default, false),
    }
}
