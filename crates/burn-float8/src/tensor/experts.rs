//! [`ExpertHooks`]: experts of a grouped linear that ranks divide among them (expert parallelism).
use std::any::Any;
use std::sync::Arc;

use burn_backend::tensor::FloatTensor;

use super::source::{CastAmax, WeightCast};
use crate::backend::Float8Backend;
use crate::layer::Layer;

/// Experts of a grouped linear on this rank. All ranks call these in the same order.
pub trait ExpertHooks<B: Float8Backend>: Any + Send + Sync {
    /// Experts of each rank.
    fn layout(&self) -> ExpertLayout;

    /// Rows of each expert on each rank, from this rank's.
    fn counts(&self, own: Vec<u32>) -> Vec<Vec<u32>>;

    /// Rows `[M', C]` from each rank, in the order of the ranks. The rows `[.., C]` begin with the rows
    /// for each rank. One row of zeros, if there are none.
    fn all_to_all(&self, rows: FloatTensor<B>, exchange: &Exchange) -> FloatTensor<B>;

    /// Operand of this rank's rows or experts, with the scales of all ranks' ones, and the amax of the
    /// cast. If [`WeightCast::divides_rows`], the contraction may be longer.
    fn cast(&self, cast: &WeightCast<'_, B>) -> (B::Operand, CastAmax<B>);
}

/// Division of experts: rank r has the experts from r · `chunk`, fewer or none at the end.
#[derive(Clone, Copy, Debug)]
pub struct ExpertLayout {
    /// Number of all experts.
    pub experts: usize,
    /// Experts on each rank, padding included.
    pub chunk: usize,
    /// This rank, from 0.
    pub rank: usize,
}

/// Numbers of elements that a rank exchanges.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Exchange {
    /// Elements for each rank.
    pub sent: Vec<usize>,
    /// Elements from each rank.
    pub received: Vec<usize>,
}

impl Exchange {
    /// The exchange that returns every element.
    pub fn reversed(&self) -> Self {
        Self { sent: self.received.clone(), received: self.sent.clone() }
    }

    /// The exchange of groups of `len` elements.
    pub fn of_groups(&self, len: usize) -> Self {
        let scaled = |counts: &[usize]| counts.iter().map(|count| count * len).collect();
        Self { sent: scaled(&self.sent), received: scaled(&self.received) }
    }
}

/// Experts of a layer on this rank, if ranks divide them.
pub(crate) fn experts_of<B: Float8Backend>(layer: &Layer) -> Option<&Arc<dyn ExpertHooks<B>>> {
    layer.experts().map(|hooks| hooks.downcast_ref().expect("all weights of a layer are of one backend"))
}
