//! [`ExpertHooks`]: experts of a grouped linear that ranks divide among them (expert parallelism).
use std::any::Any;
use std::sync::Arc;

use super::expert_route::RowExchange;
use super::source::{CastAmax, WeightCast};
use crate::backend::Float8Backend;
use crate::layer::Layer;

/// Experts of a grouped linear on this rank. All ranks call these in the same order.
pub trait ExpertHooks<B: Float8Backend>: RowExchange<B> + Any {
    /// Operand of this rank's rows or experts, with the scales of all ranks' ones, and the amax of the
    /// cast. If [`WeightCast::divides_rows`], the contraction may be longer.
    fn cast(&self, cast: &WeightCast<'_, B>) -> (B::Operand, CastAmax<B>);
}

/// Experts of a layer on this rank, if ranks divide them.
pub(crate) fn experts_of<B: Float8Backend>(layer: &Layer) -> Option<&Arc<dyn ExpertHooks<B>>> {
    layer.experts().map(|hooks| hooks.downcast_ref().expect("all weights of a layer are of one backend"))
}
