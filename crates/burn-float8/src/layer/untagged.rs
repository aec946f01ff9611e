//! The layers that stand for linears whose weights carry none, one for each device, and what such linears do.
use std::any::TypeId;
use std::collections::HashMap;
use std::sync::{Arc, LazyLock};

use burn_backend::tensor::Device;
use burn_backend::{DeviceId, DeviceOps};
use parking_lot::Mutex;

use super::Layer;
use crate::backend::Float8Backend;
use crate::config::{Policy, Untagged};

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
}

type Defaults = HashMap<(TypeId, DeviceId), DeviceDefault>;
static DEFAULTS: LazyLock<Mutex<Defaults>> = LazyLock::new(Mutex::default);

fn with_default<B: Float8Backend, T>(device: &Device<B>, f: impl FnOnce(&mut DeviceDefault) -> T) -> T {
    let new = || {
        let policy = Policy::Float8(Default::default());
        DeviceDefault { layer: Arc::new(Layer::new(UNTAGGED_NAME, policy, Arc::default())), rule: None }
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

/// An untagged linear runs: if it is the first on the device, and no configuration was applied there, such linears run by the device's
/// default from now on.
pub(crate) fn settle_at_linear<B: Float8Backend>(device: &Device<B>) -> UntaggedRule {
    settle::<B>(device, UntaggedRule { choice: Untagged::Default, is_configured: false })
}

/// A configuration is applied to linears of the device: if it is the first, and no untagged linear has run there, it says what such
/// linears do. The rule that holds from now on.
pub(crate) fn settle_at_apply<B: Float8Backend>(device: &Device<B>, asked_for: Option<Untagged>) -> UntaggedRule {
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
