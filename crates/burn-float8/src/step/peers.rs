//! [`AmaxReduce`]: decisions that all processes of a model's training make together when a step
//! ends. Otherwise each process would scale by the amaxes of only its part of the batch. A process
//! that moved a layer out of FP8 without the others would wait for values while they exchange
//! codes.
use std::sync::Arc;

use burn_backend::tensor::{Device, FloatTensor};

use crate::backend::Float8Backend;
use crate::config::{DelayedScaling, Policy};
use crate::layer::{CastPlan, Fallback, Layer, LinearPlan};
use crate::terms::{Operand, Role};

/// Processes that train one model together. All call the same methods in the same order.
pub trait AmaxReduce<B: Float8Backend>: Send + Sync {
    /// Element-wise maximum of all processes' amaxes `[n]`; NaN wins.
    fn max(&self, label: &str, amaxes: FloatTensor<B>) -> FloatTensor<B>;

    /// Element-wise maximum of all processes' words.
    fn max_bits(&self, label: &str, bits: Vec<u32>) -> Vec<u32>;

    /// Fallbacks decided by all processes, at most one per layer.
    fn union(&self, own: Vec<(Arc<Layer>, Fallback)>) -> Vec<(Arc<Layer>, Fallback)>;
}

/// A cast with delayed scaling.
#[derive(Clone, Debug)]
pub(crate) struct TrackedCast {
    pub(crate) layer: String,
    pub(crate) role: Role,
    pub(crate) scaling: DelayedScaling,
    /// An amax with a scale of 1.
    pub(crate) initial: f32,
}

/// Peers of a device's steps.
pub(crate) struct Peers<B: Float8Backend> {
    pub(super) others: Arc<dyn AmaxReduce<B>>,
    pub(super) device: Device<B>,
    /// Casts in the order of the model, the same in every process. A process may have cast nothing
    /// in a step.
    pub(super) casts: Vec<TrackedCast>,
}

impl<B: Float8Backend> Peers<B> {
    pub(crate) fn new(others: Arc<dyn AmaxReduce<B>>, device: Device<B>, layers: &[Arc<Layer>]) -> Self {
        Self { others, device, casts: layers.iter().flat_map(|layer| TrackedCast::all_of(layer)).collect() }
    }
}

impl TrackedCast {
    /// Casts of a layer with delayed scaling.
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
