//! [`Tag`]: the layer that a weight belongs to, and what keeps it when optimizers build new weights.
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use super::Layer;

/// From 1: 0 is before all.
static STAMP: AtomicU64 = AtomicU64::new(1);

/// The stamp that no weight built so far exceeds.
pub(crate) fn now() -> u64 {
    STAMP.load(Relaxed)
}

/// What a linear's weight carries.
#[derive(Clone)]
pub(crate) struct Tag {
    pub(crate) layer: Arc<Layer>,
    /// When the weight got its value: grows with every operation that mixes a weight with another tensor, as an optimizer's
    /// update does. Casts, transposes and scalar factors keep it: the same weight in another form.
    pub(crate) stamp: u64,
    /// Whether this copy of the model may run in FP8.
    pub(crate) enabled: bool,
}

impl Tag {
    pub(crate) fn new(layer: Arc<Layer>) -> Self {
        let stamp = STAMP.fetch_add(1, Relaxed) + 1;
        layer.set_built(stamp);
        Self { layer, stamp, enabled: true }
    }

    /// The tag of a weight that was built from this one.
    fn rebuilt(self) -> Self {
        Self { enabled: self.enabled, ..Self::new(self.layer) }
    }
}

/// What a tensor has to do with the weights of layers.
#[derive(Clone)]
pub(crate) enum Mark {
    /// The tensor is a weight.
    Weight(Tag),
    /// The tensor has rank 1 and is a concatenation of flattened parameters, with weights in these ranges: L-BFGS makes one.
    Flattened(Arc<[(Range<usize>, Tag)]>),
    /// The tensor is the gradient of the rows that this process has of a weight, or was computed from them, as moments are.
    ShardGradient(Arc<Layer>),
}

impl Mark {
    /// The mark of the result of an operation on this tensor and on `others` more float tensors.
    pub(crate) fn after(self, others: usize) -> Self {
        match self {
            Self::Weight(tag) if others > 0 => Self::Weight(tag.rebuilt()),
            mark => mark,
        }
    }

    /// The mark of the result of a binary operation: that of a weight if either operand is one, else that of a shard's gradient.
    pub(crate) fn either(one: Option<Self>, other: Option<Self>) -> Option<Self> {
        match (one, other) {
            (None | Some(Self::ShardGradient(_)), Some(other)) => Some(other),
            (one, _) => one,
        }
    }

    /// The mark of several tensors of rank 1, given with their lengths, put one after the other.
    pub(crate) fn concatenate(parts: impl IntoIterator<Item = (usize, Option<Self>)>) -> Option<Self> {
        let (mut begin, mut weights) = (0, vec![]);
        for (len, mark) in parts {
            match mark {
                Some(Self::Weight(tag)) => weights.push((begin..begin + len, tag)),
                Some(Self::Flattened(inner)) => weights
                    .extend(inner.iter().map(|(range, tag)| (begin + range.start..begin + range.end, tag.clone()))),
                Some(Self::ShardGradient(_)) | None => {}
            }
            begin += len;
        }
        (!weights.is_empty()).then(|| Self::Flattened(weights.into()))
    }

    /// The mark of a part of a tensor of rank 1: a weight's, if it is exactly that weight.
    pub(crate) fn slice(&self, part: &Range<usize>) -> Option<Self> {
        let Self::Flattened(weights) = self else { return None };
        let found = weights.iter().find(|(range, _)| range == part);
        found.map(|(_, tag)| Self::Weight(tag.clone().rebuilt()))
    }
}
