//! [`StepPeers`]: what processes decide together when a step ends that train one model. Each would otherwise scale by its own part of
//! the batch, or leave FP8 alone, and wait for operands that no other makes.
use std::sync::Arc;

use burn_backend::tensor::{Device, FloatTensor};

use crate::backend::Float8Backend;
use crate::config::{DelayedScaling, Policy, ScalingType};
use crate::layer::{Fallback, Layer};
use crate::terms::{Operand, Role};

/// The processes that train one model together: all call the same methods in the same order.
pub trait StepPeers<B: Float8Backend>: Send + Sync {
    /// The largest of all processes' amaxes `[n]`; NaN wins.
    fn max(&self, label: &str, amaxes: FloatTensor<B>) -> FloatTensor<B>;

    /// The largest of all processes' words, each by itself.
    fn max_bits(&self, label: &str, bits: Vec<u32>) -> Vec<u32>;

    /// The decisions of all processes, one for a layer.
    fn union(&self, own: Vec<(Arc<Layer>, Fallback)>) -> Vec<(Arc<Layer>, Fallback)>;
}

/// A cast with delayed scaling.
#[derive(Clone, Debug)]
pub(crate) struct TrackedCast {
    pub(crate) layer: String,
    pub(crate) role: Role,
    pub(crate) scaling: DelayedScaling,
    /// An amax whose scale is 1.
    pub(crate) initial: f32,
}

/// With whom the steps of a device are made.
pub(crate) struct Peers<B: Float8Backend> {
    pub(super) others: Arc<dyn StepPeers<B>>,
    pub(super) device: Device<B>,
    /// In the order of the model, the same everywhere: a process may have cast nothing in a step.
    pub(super) casts: Vec<TrackedCast>,
}

impl<B: Float8Backend> Peers<B> {
    pub(crate) fn new(others: Arc<dyn StepPeers<B>>, device: Device<B>, layers: &[Arc<Layer>]) -> Self {
        Self { others, device, casts: layers.iter().flat_map(|layer| tracked_casts(layer)).collect() }
    }
}

/// The casts of a layer that are scaled by a history.
fn tracked_casts(layer: &Layer) -> Vec<TrackedCast> {
    let policy = layer.configured();
    let Policy::Float8(config) = policy.as_ref() else { return vec![] };
    let new = |operand: Operand| {
        let cast = config.casts().of(operand);
        (cast.scaling_type == ScalingType::Delayed).then(|| TrackedCast {
            layer: layer.name().into(),
            role: operand.role,
            scaling: config.delayed_scaling(),
            initial: cast.target_dtype.max(),
        })
    };
    let mut casts: Vec<TrackedCast> = Operand::ALL.into_iter().filter_map(new).collect();
    casts.dedup_by_key(|cast| cast.role);
    casts
}
