//! The layers that stand for linears whose weights carry none, one for each device, and what such linears do.
use std::any::TypeId;
use std::collections::{HashMap, HashSet};
use std::sync::{Arc, LazyLock};

use burn_backend::tensor::Device;
use burn_backend::{DeviceId, DeviceOps};
use parking_lot::Mutex;

use super::Layer;
use crate::backend::Float8Backend;
use crate::config::{LinearInfo, Policy, Untagged};

/// The name under which reports list the linears whose weights carry no layer.
pub const UNTAGGED_NAME: &str = "(untagged)";

/// What untagged linears of a device do, once it is settled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct UntaggedRule {
    pub(crate) choice: Untagged,
    /// Whether a configuration says so, or [`set_default_config`](crate::set_default_config).
    pub(crate) is_configured: bool,
}

struct DeviceDefault {
    layer: Arc<Layer>,
    rule: Option<UntaggedRule>,
    /// Linears that had a layer at some time.
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

/// The device's layer for untagged weights.
pub(crate) fn untagged<B: Float8Backend>(device: &Device<B>) -> Arc<Layer> {
    with_default::<B, _>(device, |default| default.layer.clone())
}

/// What untagged linears of the device do, if that is settled.
pub(crate) fn untagged_rule<B: Float8Backend>(device: &Device<B>) -> Option<UntaggedRule> {
    with_default::<B, _>(device, |default| default.rule)
}

/// Whether a linear of this name and size on the device had a layer at some time.
pub(crate) fn was_applied<B: Float8Backend>(device: &Device<B>, linear: &LinearInfo) -> bool {
    with_default::<B, _>(device, |default| default.applied.contains(linear))
}

/// An untagged linear runs: if it is the first on the device, and no configuration was applied there, such linears run by the device's
/// default from now on.
pub(crate) fn settle_at_linear<B: Float8Backend>(device: &Device<B>) -> UntaggedRule {
    settle::<B>(device, UntaggedRule { choice: Untagged::Default, is_configured: false })
}

/// The rule for untagged linears after a configuration was applied to these linears of the device. It is the configuration's if
/// nothing has settled it before: another configuration, or an untagged linear that ran.
pub(crate) fn settle_at_apply<B: Float8Backend>(
    device: &Device<B>,
    asked_for: Option<Untagged>,
    linears: impl Iterator<Item = LinearInfo>,
) -> UntaggedRule {
    with_default::<B, _>(device, |default| default.applied.extend(linears));
    let choice = asked_for.unwrap_or(Untagged::HighPrecision);
    settle::<B>(device, UntaggedRule { choice, is_configured: asked_for.is_some() })
}

/// The rule of the device: this one if there is none yet.
fn settle<B: Float8Backend>(device: &Device<B>, rule: UntaggedRule) -> UntaggedRule {
    with_default::<B, _>(device, |default| *default.rule.get_or_insert(rule))
}

/// Untagged linears of the device run by this policy from now on.
pub(crate) fn set_default<B: Float8Backend>(device: &Device<B>, policy: Policy) {
    with_default::<B, _>(device, |default| {
        default.layer.configure(policy);
        default.rule = Some(UntaggedRule { choice: Untagged::Default, is_configured: true });
    });
}
