//! [`Peers`]: decisions that all processes of a model's training make together when a step ends.
//! Otherwise each process would scale by the amaxes of only its part of the batch. A process that
//! moved a layer out of FP8 without the others would wait for values while they exchange codes.
use std::sync::{Arc, Weak};

use burn_backend::tensor::{Device, FloatTensor};

use crate::backend::Float8Backend;
use crate::config::{DelayedScaling, FallbackTo, Policy};
use crate::layer::{CastPlan, Fallback, Layer, LinearPlan};
use crate::terms::{Operand, Role};

/// Exchange between all ranks that train a model. All call these in the same order.
pub trait PeerExchange<B: Float8Backend>: Send + Sync {
    /// Element-wise maximum of amaxes `[n]` over all ranks; NaN wins.
    fn max(&self, label: &str, amaxes: FloatTensor<B>) -> FloatTensor<B>;

    /// Bytes of all ranks, in their order.
    fn exchange(&self, label: &str, own: &[u8]) -> Vec<Vec<u8>>;
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
    pub(super) hooks: Arc<dyn PeerExchange<B>>,
    pub(super) device: Device<B>,
    /// Casts in the order of the model, the same in every process. A process may have cast nothing
    /// in a step.
    pub(super) casts: Vec<TrackedCast>,
    /// Layers whose statistics may move them out of their recipe.
    layers: Vec<Weak<Layer>>,
}

impl<B: Float8Backend> Peers<B> {
    pub(crate) fn new(hooks: Arc<dyn PeerExchange<B>>, device: Device<B>, layers: &[Arc<Layer>]) -> Self {
        let casts = layers.iter().flat_map(|layer| TrackedCast::all_of(layer)).collect();
        let may_fall_back = |layer: &&Arc<Layer>| {
            let config = &layer.applied().config;
            config.fallback.is_some() && config.statistics.is_some()
        };
        let layers = layers.iter().filter(may_fall_back).map(Arc::downgrade).collect();
        Self { hooks, device, casts, layers }
    }

    /// Whether any process says 1, element by element.
    pub(super) fn any(&self, label: &str, own: Vec<u8>) -> Vec<bool> {
        let all = self.hooks.exchange(label, &own);
        (0..own.len()).map(|i| all.iter().any(|bytes| bytes.get(i) == Some(&1))).collect()
    }

    /// Fallbacks that any process has decided. For several decisions about one layer the first
    /// process' wins.
    pub(super) fn union(&self, own: Vec<(Arc<Layer>, Fallback)>) -> Vec<(Arc<Layer>, Fallback)> {
        if self.layers.is_empty() {
            return own;
        }
        let lines: Vec<String> = own.iter().map(|(layer, fallback)| encode(layer.name(), fallback)).collect();
        let all = self.hooks.exchange("fallbacks", lines.join("\n").as_bytes());
        let mut decisions: Vec<(Arc<Layer>, Fallback)> = vec![];
        for line in all.iter().flat_map(|bytes| core::str::from_utf8(bytes).unwrap_or_default().lines()) {
            let Some((name, fallback)) = decode(line) else { continue };
            let layer = self.layers.iter().filter_map(Weak::upgrade).find(|layer| layer.name() == name);
            if let Some(layer) = layer.filter(|layer| !decisions.iter().any(|(known, _)| Arc::ptr_eq(known, layer))) {
                decisions.push((layer, fallback));
            }
        }
        decisions
    }
}

/// Encodes a decision as a line without newline: step, target, layer, reason.
fn encode(name: &str, Fallback { step, to, reason }: &Fallback) -> String {
    let to = match to {
        FallbackTo::HighPrecision => "high_precision",
        FallbackTo::Rowwise => "rowwise",
    };
    format!("{step}\t{to}\t{name}\t{reason}")
}

fn decode(line: &str) -> Option<(&str, Fallback)> {
    let mut parts = line.splitn(4, '\t');
    let step = parts.next()?.parse().ok()?;
    let to = match parts.next()? {
        "rowwise" => FallbackTo::Rowwise,
        _ => FallbackTo::HighPrecision,
    };
    let name = parts.next()?;
    Some((name, Fallback { step, to, reason: parts.next()?.into() }))
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_decision_survives_the_way() {
        for to in [FallbackTo::HighPrecision, FallbackTo::Rowwise] {
            let fallback = Fallback { step: 12, to, reason: "SQNR of input 9.1 dB, limit 10 dB".into() };
            assert_eq!(decode(&encode("layers.0.wq", &fallback)), Some(("layers.0.wq", fallback)));
        }
        assert_eq!(decode(""), None);
    }
}
