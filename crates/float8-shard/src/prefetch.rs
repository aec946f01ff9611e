//! [`Prefetch`]: gathers the next layer's weight while this layer computes.
//!
//! The order of gathers is recorded in the previous step, as layers usually run in the same order
//! in each. A step that differs, such as one with another number of micro-batches, gathers the rest
//! on demand and becomes the new record. All ranks run the same layers in the same order, so all
//! start the same gathers.
use std::sync::Arc;

use burn_float8::backend::Float8Backend;
use burn_float8::shard_hooks::{SourcedWeight, WeightCast, shared};
use parking_lot::Mutex;

/// A gather: layer name, and whether it gathers the transposed weight.
type Gather = (String, bool);

/// Order of gathers of one conversion's layers on one device.
pub(crate) struct Prefetch<B: Float8Backend>(Mutex<Order<B>>);

struct Order<B: Float8Backend> {
    /// Weights that the current step reads; empty outside of a step.
    weights: Vec<Arc<SourcedWeight<B>>>,
    last_step: Vec<Gather>,
    this_step: Vec<Gather>,
    /// Whether this step has so far gathered in the order of the last one.
    is_alike: bool,
}

impl<B: Float8Backend> Default for Prefetch<B> {
    fn default() -> Self {
        Self(Mutex::new(Order { weights: vec![], last_step: vec![], this_step: vec![], is_alike: true }))
    }
}

impl<B: Float8Backend> Prefetch<B> {
    /// State that the weights of a conversion share on a device.
    pub(crate) fn of(cast: &WeightCast<'_, B>) -> Arc<Self> {
        shared(cast.layer(), &cast.device())
    }

    /// Begins a step that reads these weights. Gathers still in flight for the last step's weights
    /// must have been dropped.
    pub(crate) fn begin(&self, weights: Vec<SourcedWeight<B>>) {
        let order = &mut *self.0.lock();
        order.last_step = core::mem::take(&mut order.this_step);
        order.is_alike = true;
        order.weights = weights.into_iter().map(Arc::new).collect();
    }

    /// Ends the step once its gradients are computed, and returns its weights.
    pub(crate) fn end(&self) -> Vec<Arc<SourcedWeight<B>>> {
        core::mem::take(&mut self.0.lock().weights)
    }

    /// Records a gather. Returns the weight that the last step gathered next, and whether
    /// transposed.
    pub(crate) fn next(&self, name: &str, is_transposed: bool) -> Option<(Arc<SourcedWeight<B>>, bool)> {
        let order = &mut *self.0.lock();
        if order.weights.is_empty() {
            return None;
        }
        let at = order.this_step.len();
        order.is_alike &= order.last_step.get(at).is_some_and(|(last, of)| last == name && *of == is_transposed);
        order.this_step.push((name.into(), is_transposed));
        let (next, is_transposed) = order.last_step.get(at + 1).filter(|_| order.is_alike)?;
        let weight = order.weights.iter().find(|weight| weight.layer().name() == next)?;
        Some((weight.clone(), *is_transposed))
    }
}
