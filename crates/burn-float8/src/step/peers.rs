//! [`StepPeers`]: what the processes that train one model decide together when a step ends. Alone, each would scale by the amaxes of its
//! own part of the batch; and one that alone moved a layer out of FP8 would wait for values while the others exchange codes.
use std::sync::Arc;

use burn_backend::tensor::{Device, FloatTensor};

use crate::backend::Float8Backend;
use crate::config::{DelayedScaling, Policy};
use crate::layer::{CastPlan, Fallback, Layer, LinearPlan};
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
        Self { others, device, casts: layers.iter().flat_map(|layer| TrackedCast::all_of(layer)).collect() }
    }
}

impl TrackedCast {
    /// The casts of a layer that are scaled by a history.
    pub(crate) fn all_of(layer: &Layer) -> Vec<Self> {
        let policy = layer.configured();
        let Policy::Float8(config) = policy.as_ref() else { return vec![] };
        let plan = LinearPlan::new(config);
        let new = |operand: Operand| {
            let CastPlan { cast, delayed } = plan.cast(operand)?;
            let (layer, initial) = (layer.name().into(), cast.format.max());
            Some(Self { layer, role: operand.role, scaling: delayed?, initial })
        };
        let mut casts: Vec<Self> = Operand::ALL.into_iter().filter_map(new).collect();
        casts.dedup_by_key(|cast| cast.role);
        casts
    }
}
