//! [`Tag`] links a weight to its layer. [`Mark`] carries it to the new weights that optimizers
//! build.
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use super::Layer;

/// Starts at 1: 0 precedes all weights.
static STAMP: AtomicU64 = AtomicU64::new(1);

/// Stamp not exceeded by any weight built so far.
pub(crate) fn now() -> u64 {
    STAMP.load(Relaxed)
}

/// Link from a linear's weight to its layer.
#[derive(Clone)]
pub(crate) struct Tag {
    pub(crate) layer: Arc<Layer>,
    /// Increases with every operation that combines the weight with another tensor, such as an
    /// optimizer update. Casts, transposes and scalar factors keep it: they give the same weight in
    /// another form.
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

    /// Tag of a weight built from this one.
    fn rebuilt(self) -> Self {
        Self { enabled: self.enabled, ..Self::new(self.layer) }
    }
}

/// Relation of a tensor to the weights of layers.
#[derive(Clone)]
pub(crate) enum Mark {
    /// The tensor is a weight.
    Weight(Tag),
    /// A rank-1 concatenation of flattened parameters, with weights in these ranges. L-BFGS builds
    /// one.
    Flattened(Arc<[(Range<usize>, Tag)]>),
    /// Gradient of a shard or a part of a weight, or a tensor computed from it, such as a moment.
    ShardGradient(Arc<Layer>),
}

impl Mark {
    /// Mark of an operation's result, for this tensor and `others` more float tensors.
    pub(crate) fn after(self, others: usize) -> Self {
        match self {
            Self::Weight(tag) if others > 0 => Self::Weight(tag.rebuilt()),
            mark => mark,
        }
    }

    /// Mark of a binary operation's result: a weight's mark takes precedence over a shard
    /// gradient's.
    pub(crate) fn either(one: Option<Self>, other: Option<Self>) -> Option<Self> {
        match (one, other) {
            (None | Some(Self::ShardGradient(_)), Some(other)) => Some(other),
            (one, _) => one,
        }
    }

    /// Mark of a concatenation of rank-1 tensors, given with their lengths.
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

    /// Mark of a slice of a rank-1 tensor: the weight's mark if the slice is exactly that weight.
    pub(crate) fn slice(&self, part: &Range<usize>) -> Option<Self> {
        let Self::Flattened(weights) = self else { return None };
        let found = weights.iter().find(|(range, _)| range == part);
        found.map(|(_, tag)| Self::Weight(tag.clone().rebuilt()))
    }
}
