//! The copy of a tensor that a GEMM reads, made when no clone of the tensor has one.
use std::sync::Arc;

use float8_kernels::Orientation;

use super::cache::{CopyKey, Entries, Fp8Copy, Held};
use super::cast::{CastRequest, View, cast_key, reads_columns};
use super::{Float8Tensor, ahead, recent};
use crate::backend::{Float8Backend, Quantized, ScaleFrom};
use crate::config::Float8LinearConfig;
use crate::layer::Layer;
use crate::step::Observation;
use crate::terms::{ContractionAxis, Operand, Role};

/// The copy of `t` that a GEMM reads, made now if no clone of `t` has one. Amaxes that backward reads count in their histories;
/// those of forward once backward follows ([`confirm`]).
pub(crate) fn fp8_copy<B: Float8Backend>(
    t: &Float8Tensor<B>,
    view: View<'_, B>,
    request: CastRequest<'_>,
) -> Arc<Fp8Copy<B>> {
    let CastRequest { operand, layer, in_forward, .. } = request;
    let key = CopyKey { cast: request.key(), layout: view.layout(), operand };
    // The lock is held while casting, so that threads which race for the same tensor cast it once.
    let mut entries = t.cache().lock();
    entries.copies.retain(|(_, held)| !matches!(held, Held::Weak(weak) if weak.strong_count() == 0));
    let known = entries.find(key);
    let is_gathered = known.is_none() && request.sharding().is_some();
    let copy = known.unwrap_or_else(|| entries.make(t, view, request));
    drop(entries);
    if is_gathered {
        ahead::note_gathered(t, request);
    }
    if let Some(observation) = &copy.result.observation {
        match (in_forward, operand.role) {
            (false, _) => observation.confirm(),
            (true, Role::Input) => layer.set_input_history_owner(&observation.layer),
            (true, _) => {}
        }
    }
    copy
}

/// Backward has come to `t`, which fprop read as this operand of a layer: what its cast found out counts.
pub(crate) fn confirm<B: Float8Backend>(
    t: &Float8Tensor<B>,
    layer: &Layer,
    config: &Float8LinearConfig,
    operand: Operand,
) {
    if let Some(observation) = observation(t, layer, config, operand) {
        observation.confirm();
    }
}

/// What the cast of an operand has to tell its history.
pub(crate) fn observation<B: Float8Backend>(
    t: &Float8Tensor<B>,
    layer: &Layer,
    config: &Float8LinearConfig,
    operand: Operand,
) -> Option<Arc<Observation<B>>> {
    let key = cast_key(layer, config, operand);
    key.delayed?;
    t.known_cache()?.lock().result(key)?.observation.clone()
}

/// `t` cast as the request says, with the scale that other copies of the cast have; nothing is kept or counted.
pub(super) fn recast<B: Float8Backend>(
    t: &Float8Tensor<B>,
    view: View<'_, B>,
    request: CastRequest<'_>,
) -> Option<B::Operand> {
    let key = request.key();
    let is_sharded = request.sharding().is_some();
    // Its scales are not those of this rank's rows.
    if is_sharded && reads_columns(key, request.operand) {
        return None;
    }
    let entries = t.cache().lock();
    // The copy of a sharded weight has every rank's rows.
    if !is_sharded
        && let Some(copy) = entries.find(CopyKey { cast: key, layout: view.layout(), operand: request.operand })
    {
        return Some(copy.operand.clone());
    }
    let known = entries.result(key).filter(|_| key.has_one_scale());
    let scale = match (known, key.delayed) {
        (Some(known), _) => ScaleFrom::Amax { amax: known.scaling.clone(), observe: false },
        // Its history is not to be guessed.
        (None, Some(_)) => return None,
        (None, None) => ScaleFrom::Dynamic,
    };
    drop(entries);
    let Quantized { rows, cols, .. } = B::fp8_quantize(view.of(t), key.cast, request.operand.axis.orientation(), scale);
    rows.or(cols)
}

impl CastRequest<'_> {
    /// Which copies one pass makes: both where the other GEMM will read the same cast.
    fn orientation(&self) -> Orientation {
        let Self { operand, layer, config, .. } = *self;
        let other = operand.other();
        let is_shared = || {
            let casts = config.casts();
            !casts.of(other).is_disabled() && self.key() == cast_key(layer, config, other)
        };
        let both = match operand {
            Operand::WEIGHT_T => {
                layer.take_expects_dgrad() && !config.force_recompute_fp8_weight_in_bwd() && is_shared()
            }
            // wgrad comes after dgrad.
            Operand::GRAD_OUTPUT => is_shared(),
            _ => false,
        };
        if both { Orientation::Both } else { operand.axis.orientation() }
    }
}

impl<B: Float8Backend> Entries<B> {
    /// Casts `t`, keeps the copies as the cache's module says, and returns the one that is asked for.
    fn make(&mut self, t: &Float8Tensor<B>, view: View<'_, B>, request: CastRequest<'_>) -> Arc<Fp8Copy<B>> {
        if let Some(sharding) = request.sharding() {
            return self.gather(t, request, sharding);
        }
        let CastRequest { operand, layer, config, .. } = request;
        let orientation = match view {
            View::Own => request.orientation(),
            View::Computed(..) => operand.axis.orientation(),
        };
        layer.count_cast(operand.role);
        let (Quantized { rows, cols, .. }, result) = self.quantize(t, view.of(t), orientation, request, None);
        let cast = request.key();
        let mut wanted = None;
        for (axis, made) in [(ContractionAxis::Last, rows), (ContractionAxis::Leading, cols)] {
            let Some(made) = made else { continue };
            let copy = Fp8Copy::new(made, cast.cast, result.clone(), layer);
            let held = match operand.role {
                Role::Input => {
                    recent::push(copy.clone());
                    Held::Weak(Arc::downgrade(&copy))
                }
                Role::Weight if config.force_recompute_fp8_weight_in_bwd() => Held::Weak(Arc::downgrade(&copy)),
                Role::Weight | Role::GradOutput => Held::Strong(copy.clone()),
            };
            self.copies.push((CopyKey { cast, layout: view.layout(), operand: Operand { axis, ..operand } }, held));
            if axis == operand.axis {
                wanted = Some(copy);
            }
        }
        wanted.expect("fp8_quantize returns every orientation that it is asked for")
    }
}

#[cfg(all(test, feature = "flex"))]
mod tests {
    use std::panic::{AssertUnwindSafe, catch_unwind};

    use burn::backend::Flex;
    use burn_backend::ops::FloatTensorOps;
    use burn_backend::tensor::FloatTensor;
    use burn_backend::{FloatDType, TensorMetadata};
    use burn_std::Shape;

    use super::super::cache::Layout;
    use super::*;
    use crate::config::Policy;

    /// The lock is held while casting; the next cast finds it free, and nothing half made behind it.
    #[test]
    fn a_panic_in_a_cast_poisons_nothing() {
        let ones = Flex::float_ones(Shape::from(vec![3, 5]), &Default::default(), FloatDType::F32);
        let t = Float8Tensor::<Flex>::new(ones);
        let config = Float8LinearConfig::default();
        let layer = Arc::new(Layer::new("layer", Policy::Float8(config.clone()), Arc::default()));
        let request = CastRequest { operand: Operand::INPUT, layer: &layer, config: &config, in_forward: true };
        let panics = || -> FloatTensor<Flex> { panic!("in a cast") };
        let cast = || fp8_copy(&t, View::Computed(Layout::Matrix, &panics), request);
        for _ in 0..2 {
            assert!(catch_unwind(AssertUnwindSafe(cast)).is_err());
        }
        let copy = fp8_copy(&t, View::Own, request);
        assert_eq!((Flex::fp8_size(&copy.operand).k, layer.live_copies()), (t.shape()[1], 1));
    }
}
