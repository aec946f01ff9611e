//! The layer of untagged linears on each device, and the rule for such linears.
use std::any::TypeId;
use std::collections::{HashMap, HashSet};
use std::sync::{Arc, LazyLock};

use burn_backend::tensor::Device;
use burn_backend::{DeviceId, DeviceOps};
use parking_lot::Mutex;

use super::Layer;
use crate::backend::Float8Backend;
use crate::config::{LinearInfo, Policy, Untagged};

/// Name of untagged linears in reports.
pub const UNTAGGED_NAME: &str = "(untagged)";

/// Rule for untagged linears on a device, once settled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct UntaggedRule {
    pub(crate) choice: Untagged,
    /// Whether a configuration or [`set_default_config`](crate::set_default_config) set it.
    pub(crate) is_configured: bool,
}

struct DeviceDefault {
    layer: Arc<Layer>,
    rule: Option<UntaggedRule>,
    /// Linears that had a layer at any time.
    applied: HashSet<LinearInfo>,
}

type Defaults = HashMap<(TypeId, DeviceId), DeviceDefault>;
static DEFAULTS: LazyLock<Mutex<Defaults>> = LazyLock::new(Mutex::default);

fn with_default<B: Float8Backend, T>(device: &Device<B>, f: impl FnOnce(&mut DeviceDefault) -> T) -> T {
    let new = || {
        let policy = Policy::Float8(Default::default());
        let layer = Arc::new(Layer::new(UNTAGGED_NAME, policy, Arc::default()));
        DeviceDefault { layer, rule: None, applied: HashSet::new() }
    };
    f(DEFAULTS.lock().entry((TypeId::of::<B>(), device.id())).or_insert_with(new))
}

/// Layer of untagged weights on the device.
pub(crate) fn untagged<B: Float8Backend>(device: &Device<B>) -> Arc<Layer> {
    with_default::<B, _>(device, |default| default.layer.clone())
}

/// Rule for untagged linears on the device, if settled.
pub(crate) fn untagged_rule<B: Float8Backend>(device: &Device<B>) -> Option<UntaggedRule> {
    with_default::<B, _>(device, |default| default.rule)
}

/// Whether a linear of this name and size on the device had a layer at any time.
pub(crate) fn was_applied<B: Float8Backend>(device: &Device<B>, linear: &LinearInfo) -> bool {
    with_default::<B, _>(device, |default| default.applied.contains(linear))
}

/// Rule for an untagged linear that runs. If nothing was settled before, such linears use the
/// device's default configuration from now on.
pub(crate) fn settle_at_linear<B: Float8Backend>(device: &Device<B>) -> UntaggedRule {
    settle::<B>(device, UntaggedRule { choice: Untagged::Default, is_configured: false })
}

/// Rule for untagged linears after a configuration was applied to `linears` on the device. The
/// configuration's choice applies unless another configuration or a running untagged linear settled
/// it before.
pub(crate) fn settle_at_apply<B: Float8Backend>(
    device: &Device<B>,
    asked_for: Option<Untagged>,
    linears: impl Iterator<Item = LinearInfo>,
) -> UntaggedRule {
    with_default::<B, _>(device, |default| default.applied.extend(linears));
    let choice = asked_for.unwrap_or(Untagged::HighPrecision);
    settle::<B>(device, UntaggedRule { choice, is_configured: asked_for.is_some() })
}

/// Rule of the device. Sets it if there is none.
fn settle<B: Float8Backend>(device: &Device<B>, rule: UntaggedRule) -> UntaggedRule {
    with_default::<B, _>(device, |default| *default.rule.get_or_insert(rule))
}

/// Sets the policy of untagged linears on the device from now on.
pub(crate) fn set_default<B: Float8Backend>(device: &Device<B>, policy: Policy) {
    with_default::<B, _>(device, |default| {
        default.layer.configure(policy);
        default.rule = Some(UntaggedRule { choice: Untagged::Default, is_configured: true });
    });
}
