//! [`Ahead`]: the gather of the next layer's weight runs while this layer computes.
//!
//! Which is next is known from the step before: layers run in the same order in each. A step in which they do not, such as one with
//! another number of micro-batches, gathers the rest when it is asked for, and is the example of the next. All ranks run the same
//! layers in the same order, so all start the same gathers.
use std::sync::Arc;

use burn_float8::backend::Float8Backend;
use burn_float8::source::{SourcedWeight, WeightCast, shared};
use parking_lot::Mutex;

/// A gather: the name of a layer, and whether of the transpose of its weight.
type Gather = (String, bool);

/// The order in which the layers of one conversion gather on one device.
pub(crate) struct Ahead<B: Float8Backend>(Mutex<Order<B>>);

struct Order<B: Float8Backend> {
    /// The weights of the step under way, as it reads them; outside of a step there are none.
    weights: Vec<Arc<SourcedWeight<B>>>,
    last_step: Vec<Gather>,
    this_step: Vec<Gather>,
    /// Whether this step has gathered as the last one did, so far.
    is_alike: bool,
}

impl<B: Float8Backend> Default for Ahead<B> {
    fn default() -> Self {
        Self(Mutex::new(Order { weights: vec![], last_step: vec![], this_step: vec![], is_alike: true }))
    }
}

impl<B: Float8Backend> Ahead<B> {
    /// What the weights of a conversion share on a device.
    pub(crate) fn of(cast: &WeightCast<'_, B>) -> Arc<Self> {
        shared(cast.layer(), &cast.device())
    }

    /// A step begins, which reads these weights. Of those of the last one what is on its way must have been let go.
    pub(crate) fn begin(&self, weights: Vec<SourcedWeight<B>>) {
        let order = &mut *self.0.lock();
        order.last_step = core::mem::take(&mut order.this_step);
        order.is_alike = true;
        order.weights = weights.into_iter().map(Arc::new).collect();
    }

    /// The step's gradients are there: its weights are let go.
    pub(crate) fn end(&self) -> Vec<Arc<SourcedWeight<B>>> {
        core::mem::take(&mut self.0.lock().weights)
    }

    /// Notes a gather; the weight that the last step gathered after it, and whether its transpose.
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
