//! [`Ahead`]: the gather of the next layer's weight runs while this layer computes.
//!
//! Which is next is known from the step before: layers run in the same order in each. A step in which they do not, such as one with
//! another number of micro-batches, gathers the rest when it is asked for, and is the example of the next. All ranks run the same
//! layers in the same order, so all start the same gathers.
use std::sync::Arc;

use burn_backend::DeviceOps;
use parking_lot::Mutex;

use super::cast::CastRequest;
use super::gathered::start;
use super::wrapped::Float8Tensor;
use crate::backend::Float8Backend;
use crate::config::LinearPlan;
use crate::layer::Layer;
use crate::terms::Operand;

/// A sharded weight that may be gathered in FP8.
pub(crate) struct ShardedWeight<B: Float8Backend> {
    /// This rank's rows, as the step reads them.
    pub(crate) weight: Float8Tensor<B>,
    pub(crate) layer: Arc<Layer>,
    pub(crate) plan: Arc<LinearPlan>,
}

/// A gather: the name of a layer and which orientation of its weight.
type Gather = (String, Operand);

/// The order in which the layers of one conversion gather on one device.
pub(crate) struct Ahead<B: Float8Backend>(Mutex<Order<B>>);

struct Order<B: Float8Backend> {
    /// Those of the step under way; outside of a step there are none.
    weights: Vec<Arc<ShardedWeight<B>>>,
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

impl<B: Float8Backend> ShardedWeight<B> {
    /// What the weights of its conversion share on its device.
    pub(crate) fn ahead(&self) -> Arc<Ahead<B>> {
        Ahead::of(&self.layer, &self.weight)
    }
}

impl<B: Float8Backend> Ahead<B> {
    fn of(layer: &Layer, weight: &Float8Tensor<B>) -> Arc<Self> {
        layer.conversion().state(B::float_device(weight.full()).id())
    }

    /// A step begins, which reads these weights.
    pub(crate) fn begin(&self, weights: Vec<ShardedWeight<B>>) {
        self.end();
        let order = &mut *self.0.lock();
        order.last_step = core::mem::take(&mut order.this_step);
        order.is_alike = true;
        order.weights = weights.into_iter().map(Arc::new).collect();
    }

    /// The step's gradients are there: its weights are let go, and copies on their way that nobody has read.
    pub(crate) fn end(&self) {
        let weights = core::mem::take(&mut self.0.lock().weights);
        weights.iter().for_each(|weight| weight.weight.cache().forget_started());
    }

    /// Notes a gather; the weight that the last step gathered after it, and which orientation.
    fn next(&self, name: &str, operand: Operand) -> Option<(Arc<ShardedWeight<B>>, Operand)> {
        let order = &mut *self.0.lock();
        if order.weights.is_empty() {
            return None;
        }
        let at = order.this_step.len();
        order.is_alike &= order.last_step.get(at).is_some_and(|(last, of)| last == name && *of == operand);
        order.this_step.push((name.into(), operand));
        let (next, operand) = order.last_step.get(at + 1).filter(|_| order.is_alike)?;
        let weight = order.weights.iter().find(|weight| weight.layer.name() == next)?;
        Some((weight.clone(), *operand))
    }
}

/// Notes that a copy of a sharded weight was asked for and has come, and starts the gather of the next.
pub(super) fn note_gathered<B: Float8Backend>(t: &Float8Tensor<B>, request: CastRequest<'_>) {
    let Some((next, operand)) = Ahead::of(request.layer, t).next(request.layer.name(), request.operand) else { return };
    let ShardedWeight { weight, layer, plan } = &*next;
    let Some(sharding) = layer.sharding() else { return };
    if start(weight, CastRequest { operand, layer, plan, both: false }, sharding) {
        sharding.count_ahead();
    }
}
