//! [`Peers`]: joint decisions of a sharded model's ranks at the end of a step.
use std::sync::{Arc, Weak};

use burn_backend::tensor::FloatTensor;
use burn_float8::backend::Float8Backend;
use burn_float8::config::FallbackTo;
use burn_float8::report::{Fallback, Layer};
use burn_float8::source::AmaxReduce;

use crate::world::World;

/// Ranks of a sharded model.
pub(crate) struct Peers<B: Float8Backend> {
    pub(crate) world: Arc<World<B>>,
    /// Layers of the model's linears.
    pub(crate) layers: Vec<Weak<Layer>>,
    /// Whether statistics may trigger a fallback of a layer.
    pub(crate) may_fall_back: bool,
}

impl<B: Float8Backend> AmaxReduce<B> for Peers<B> {
    fn max(&self, label: &str, amaxes: FloatTensor<B>) -> FloatTensor<B> {
        self.world.max(label, amaxes).unwrap_or_else(|error| panic!("{error}"))
    }

    fn max_bits(&self, label: &str, bits: Vec<u32>) -> Vec<u32> {
        let all = self.world.comm.all_reduce_max_bits(label, bits).and_then(|pending| pending.wait());
        all.unwrap_or_else(|error| panic!("{error}"))
    }

    /// Decisions of all ranks. For several decisions about one layer the lowest rank's wins.
    fn union(&self, own: Vec<(Arc<Layer>, Fallback)>) -> Vec<(Arc<Layer>, Fallback)> {
        if !self.may_fall_back {
            return own;
        }
        let lines: Vec<String> = own.iter().map(|(layer, fallback)| encode(layer.name(), fallback)).collect();
        let all = self.world.comm.all_gather_bytes("fallbacks", lines.join("\n").as_bytes());
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
