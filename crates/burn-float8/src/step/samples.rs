//! Statistics of the current step: quantization errors of operands, which may move a layer out of
//! FP8.
use std::collections::HashSet;
use std::sync::{Arc, Weak};

use burn_backend::tensor::FloatTensor;
use float8_kernels::Health;

use super::Peers;
use crate::backend::Float8Backend;
use crate::backend::host::read_f32;
use crate::config::{FallbackConfig, FallbackTo, Policy};
use crate::layer::{CastHealth, Fallback, Layer, OperandHealth};
use crate::terms::{Operand, Recipe, Role};

/// Statistics of the current step.
#[derive(Default)]
pub(crate) struct Samples<B: Float8Backend> {
    seen: HashSet<(usize, Operand)>,
    /// Samples still on the device.
    pending: Vec<Sample<B>>,
    /// Samples on the host, to be checked against limits when the step ends.
    unchecked: Vec<(Weak<Layer>, Role, u64, CastHealth)>,
}

/// One sampled operand of a layer.
#[derive(Clone)]
pub(crate) struct Sample<B: Float8Backend> {
    /// Weak, since the layer owns its applied configuration, which owns this sample.
    pub(crate) layer: Weak<Layer>,
    pub(crate) operand: Operand,
    pub(crate) step: u64,
    pub(crate) elements: u64,
    /// Partial sums of the cast that ran, then of each recipe to compare with.
    pub(crate) partials: Vec<(Option<Recipe>, FloatTensor<B>)>,
}

impl<B: Float8Backend> Samples<B> {
    /// Ends the step: reads the samples and moves layers that crossed limits. Waits for the device
    /// if there are samples.
    pub(crate) fn resolve(&mut self, peers: Option<&Peers<B>>) {
        self.read();
        self.seen.clear();
        // If several operands cross a limit, the reason names the first: x before w before dy.
        self.unchecked.sort_by_key(|(_, role, ..)| *role);
        let mut decisions: Vec<(Arc<Layer>, Fallback)> = vec![];
        for (layer, role, step, health) in core::mem::take(&mut self.unchecked) {
            let Some(layer) = layer.upgrade() else { continue };
            let Some(limits) = layer.applied().config.fallback else { continue };
            let is_decided = decisions.iter().any(|(known, _)| Arc::ptr_eq(known, &layer));
            if let Some(fallback) = check(&layer, role, step, &health, limits).filter(|_| !is_decided) {
                decisions.push((layer, fallback));
            }
        }
        let decisions = if let Some(peers) = peers { peers.union(decisions) } else { decisions };
        for (layer, fallback) in decisions {
            let Fallback { step, to, reason } = &fallback;
            let place = match to {
                FallbackTo::HighPrecision => "high precision",
                FallbackTo::Rowwise => "rowwise",
            };
            log::warn!("Float8: {} moved to {place} after step {step}: {reason}", layer.name());
            layer.fall_back(fallback);
        }
    }

    /// Whether an operand was sampled in this step.
    pub(crate) fn has_seen(&self, layer: &Arc<Layer>, operand: Operand) -> bool {
        self.seen.contains(&(Arc::as_ptr(layer) as usize, operand))
    }

    pub(crate) fn push(&mut self, sample: Sample<B>) {
        if self.seen.insert((sample.layer.as_ptr() as usize, sample.operand)) {
            self.pending.push(sample);
        }
    }

    /// Reads the samples taken so far.
    pub(crate) fn read(&mut self) {
        for Sample { layer, operand, step, elements, partials } in core::mem::take(&mut self.pending) {
            let mut health = partials.into_iter().map(|(recipe, partials)| {
                (recipe, CastHealth::from(Health::from_partials(elements, &read_f32::<B>(partials))))
            });
            let (_, cast) = health.next().expect("the cast that ran comes first");
            let compare = health.filter_map(|(recipe, health)| Some((recipe?, health))).collect();
            if let Some(layer) = layer.upgrade() {
                layer.set_sampled(operand, OperandHealth { step, cast, compare });
            }
            self.unchecked.push((layer, operand.role, step, cast));
        }
    }
}

/// Fallback of a layer with an operand beyond a limit.
fn check(layer: &Layer, role: Role, step: u64, health: &CastHealth, limits: FallbackConfig) -> Option<Fallback> {
    let moved = layer.fallback();
    let is_rowwise =
        matches!(layer.active().as_ref(), Policy::Float8(config) if config.casts() == Recipe::Rowwise.casts());
    let to = match (&moved, limits.to) {
        (None, FallbackTo::Rowwise) if is_rowwise => FallbackTo::HighPrecision,
        (None, to) => to,
        // Rowwise did not suffice.
        (Some(Fallback { to: FallbackTo::Rowwise, step: then, .. }), _) if step > *then => FallbackTo::HighPrecision,
        (Some(_), _) => return None,
    };
    let FallbackConfig { min_sqnr_db, max_saturated, max_flushed, max_non_finite, .. } = limits;
    let (role, share) = (role.name(), |share: f64| format!("{:.3}%", 100.0 * share));
    let low = min_sqnr_db.zip(health.sqnr_db).filter(|(limit, value)| value < limit);
    let saturated = max_saturated.filter(|limit| health.saturated > *limit);
    let flushed = max_flushed.filter(|limit| health.flushed > *limit);
    let non_finite = max_non_finite.filter(|limit| health.non_finite > *limit);
    let reason = match (low, saturated, flushed, non_finite) {
        (Some((limit, value)), ..) => format!("SQNR of {role} {value:.1} dB, limit {limit} dB"),
        (_, Some(limit), ..) => format!("{} of {role} saturated, limit {}%", share(health.saturated), 100.0 * limit),
        (_, _, Some(limit), _) => {
            format!("{} of {role} flushed to zero, limit {}%", share(health.flushed), 100.0 * limit)
        }
        (.., Some(limit)) => format!("{} elements of {role} not finite, limit {limit}", health.non_finite),
        _ => return None,
    };
    Some(Fallback { step, to, reason })
}
