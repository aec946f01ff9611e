//! Statistics of an operand. They are taken while its tensor exists and count once backward reaches
//! its linear.
use std::sync::Arc;

use burn_backend::TensorMetadata;
use burn_backend::tensor::Device;

use super::cast::CastRequest;
use super::copies::recast;
use crate::backend::Float8Backend;
use crate::config::Float8LinearConfig;
use crate::layer::{CastPlan, Layer, LinearPlan};
use crate::profile::operation;
use crate::step::{DeviceState, Sample, Step};
use crate::terms::ContractionAxis;

/// Samples an operand if the layer's statistics are due.
pub(crate) fn sample<B: Float8Backend>(request: CastRequest<'_, B>) {
    if let Some(sample) = take_sample(request) {
        push_sample(&DeviceState::of(request.layer, &request.tensor.device()), sample);
    }
}

/// Counts a sample if its step is still the current one.
pub(crate) fn push_sample<B: Float8Backend>(state: &Arc<DeviceState<B>>, sample: Sample<B>) {
    let mut step = state.lock();
    if sample.step == step.number {
        step.samples.push(sample);
    }
}

/// Statistics of an operand, if they are due. None if this copy, or the other one with the same
/// codes, was sampled in the step. None for empty tensors and FP8-only weights, which have no
/// original to compare with.
pub(crate) fn take_sample<B: Float8Backend>(request: CastRequest<'_, B>) -> Option<Sample<B>> {
    let CastRequest { tensor, operand, layer, plan, .. } = request;
    let statistics = layer.applied().config.statistics.as_ref()?;
    plan.cast(operand)?;
    if tensor.is_fp8_only() || tensor.shape().num_elements() == 0 {
        return None;
    }
    let number = due_step::<B>(layer, &tensor.device(), statistics.every_n_steps, |step| {
        let has_seen = |operand| step.samples.has_seen(layer, operand);
        !(has_seen(operand) || plan.has_one_set_of_codes(operand) && has_seen(operand.other()))
    })?;
    let _timer = operation("statistics");
    let cast = recast(request)?;
    let full = request.matrix();
    let transposed = operand.axis == ContractionAxis::Leading;
    let health = |operand: &B::Operand| B::fp8_health(full.clone(), operand, transposed);
    let mut partials = vec![(None, health(&cast))];
    for recipe in &statistics.compare {
        let Some(CastPlan { cast, .. }) = LinearPlan::new(&Float8LinearConfig::new(*recipe)).cast(operand) else {
            continue;
        };
        let orientation = operand.axis.orientation();
        let copy = B::fp8_quantize(full.clone(), cast, orientation, None).only();
        partials.push((Some(*recipe), health(&copy)));
    }
    let elements = tensor.cache().elements(tensor.shape().num_elements());
    Some(Sample { layer: Arc::downgrade(layer), operand, step: number, elements, partials })
}

/// Number of the current step, from 1. None unless it is one of every `every_n_steps` and the
/// condition holds.
fn due_step<B: Float8Backend>(
    layer: &Layer,
    device: &Device<B>,
    every_n_steps: u64,
    condition: impl FnOnce(&Step<B>) -> bool,
) -> Option<u64> {
    let state = DeviceState::<B>::of(layer, device);
    let step = state.lock();
    let is_due = step.number.saturating_sub(1).is_multiple_of(every_n_steps) && condition(&step);
    is_due.then_some(step.number)
}
