//! [`Ranks`]: what the ranks of a sharded model decide together when a step ends. Each would otherwise scale by its own part of the
//! batch, or leave FP8 alone, and gather what no other rank sends.
use std::sync::{Arc, Weak};

use burn_backend::TensorData;
use burn_backend::tensor::{Device, FloatTensor};
use float8_comm::Communicator;

use crate::backend::Float8Backend;
use crate::backend::host::read_f32;
use crate::config::{DelayedScaling, FallbackTo};
use crate::layer::{Fallback, Layer};
use crate::terms::Role;

/// A cast with delayed scaling.
#[derive(Clone, Debug)]
pub(crate) struct TrackedCast {
    pub(crate) layer: String,
    pub(crate) role: Role,
    pub(crate) scaling: DelayedScaling,
    /// An amax whose scale is 1.
    pub(crate) initial: f32,
}

/// The ranks of a sharded model, and what they have in common.
pub(crate) struct Ranks<B: Float8Backend> {
    pub(crate) comm: Communicator,
    pub(crate) device: Device<B>,
    /// In the order of the model, the same on all ranks: one of them may have cast nothing in a step.
    pub(crate) casts: Vec<TrackedCast>,
    pub(crate) layers: Vec<Weak<Layer>>,
    /// Whether statistics may move a layer out of its recipe.
    pub(crate) may_fall_back: bool,
}

impl<B: Float8Backend> Ranks<B> {
    /// The largest of every rank's amaxes `[n]`, on the device's memory where it can.
    pub(super) fn max(&self, label: &str, amaxes: FloatTensor<B>) -> FloatTensor<B> {
        if let Some(collectives) = B::fp8_collectives(&self.device, &self.comm) {
            return collectives.all_reduce_max(label, amaxes).unwrap_or_else(|error| panic!("{error}"));
        }
        let bits = read_f32::<B>(amaxes).into_iter().map(f32::to_bits).collect();
        let all: Vec<f32> = self.max_bits(label, bits).into_iter().map(f32::from_bits).collect();
        let len = all.len();
        B::float_from_data(TensorData::new(all, [len]), &self.device)
    }

    /// The largest of every rank's values by their bits: NaN wins.
    pub(super) fn max_bits(&self, label: &str, bits: Vec<u32>) -> Vec<u32> {
        let all = self.comm.all_reduce_max_bits(label, bits).and_then(|pending| pending.wait());
        all.unwrap_or_else(|error| panic!("{error}"))
    }

    /// Every rank's decisions, of several about one layer that of the lowest rank.
    pub(super) fn union(&self, own: Vec<(Arc<Layer>, Fallback)>) -> Vec<(Arc<Layer>, Fallback)> {
        if !self.may_fall_back {
            return own;
        }
        let lines: Vec<String> = own.iter().map(|(layer, fallback)| encode(layer.name(), fallback)).collect();
        let all = self.comm.all_gather_bytes("fallbacks", lines.join("\n").as_bytes());
        let all = all.unwrap_or_else(|error| panic!("{error}"));
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

/// A line without an end: step, place, layer, reason.
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
