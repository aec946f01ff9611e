//! [`fp8_copy`]: the copy of a tensor that a GEMM reads.
use std::sync::Arc;

use float8_kernels::Orientation;

use super::cache::{CastResult, CopyKey, Fp8Copy, Held};
use super::cast::CastRequest;
use super::codes::Codes;
use super::shared_input_cast;
use super::source::{WeightCast, sourced_copy};
use crate::backend::{Float8Backend, Quantized, ScaleFrom};
use crate::profile::{Work, time};
use crate::terms::{ContractionAxis, Operand, Role};

/// The copy of a tensor that a GEMM reads: found in the tensor's cache, or made now.
///
/// Threads that race for one tensor may each cast it, to the same codes. They share the first one's.
pub(crate) fn fp8_copy<B: Float8Backend>(request: CastRequest<'_, B>) -> Arc<Fp8Copy<B>> {
    let (CastRequest { tensor, operand, layer, plan, both, .. }, key) = (request, request.key());
    let mut entries = tensor.cache().lock();
    entries.copies.retain(|(_, held)| !matches!(held, Held::Weak(weak) if weak.strong_count() == 0));
    if let Some(copy) = entries.find(key) {
        return copy;
    }
    let known = entries.known(key.cast);
    // Not under the lock: a thread of rayon's pool that waits for the parts of its cast may take up a forward which reads this tensor.
    drop(entries);
    if let Some(codes) = tensor.codes() {
        return copy_of_codes(codes, request, key);
    }
    if let Some(source) = request.source() {
        return sourced_copy(request, source);
    }
    let scale = request.scale(known);
    let is_one_pass = both && !request.is_transient() && plan.is_one_cast(operand);
    let orientation = if is_one_pass { Orientation::Both } else { operand.axis.orientation() };
    let cast = key.cast.cast;
    let timer = time(Work::Cast { role: operand.role, format: cast.format });
    let quantized = B::fp8_quantize(request.matrix(), cast, orientation, scale.from.clone());
    drop(timer);
    layer.count_cast(operand.role);
    let result = scale.result(quantized.amax.clone());
    keep(request, quantized, result)
}

/// The copy of an FP8-only weight that a GEMM reads, which no clone of it has. Casts are not made under the cache's lock: they run
/// in a pool whose threads may take up other forwards.
///
/// | a GEMM reads | copy | held |
/// | --- | --- | --- |
/// | wᵀ `[N, K]` in the cast of the codes | the codes | by the weight |
/// | w `[K, N]`, where one scale serves both orientations | their transpose | by the GEMM |
/// | anything else | a cast of the decoded values | by the GEMM |
fn copy_of_codes<B: Float8Backend>(
    codes: &Arc<Codes<B>>,
    request: CastRequest<'_, B>,
    key: CopyKey,
) -> Arc<Fp8Copy<B>> {
    let CastRequest { tensor, operand, layer, .. } = request;
    let cast = key.cast.cast;
    let is_cast = (cast.format, cast.granularity) == (codes.format, codes.granularity);
    let result = || Arc::new(CastResult { scaling: codes.amax.clone(), observed: None, observation: None });
    let copy = |made, result| Fp8Copy::new(made, cast, result, layer);
    let copy = match operand.axis {
        ContractionAxis::Leading if is_cast => {
            let copy = copy(codes.operand.clone(), result());
            tensor.cache().lock().copies.push((key, Held::Strong(copy.clone())));
            return copy;
        }
        ContractionAxis::Last if is_cast && codes.serves_both(cast) => copy(B::fp8_transpose(&codes.operand), result()),
        axis => {
            layer.count_cast(operand.role);
            let Quantized { rows, cols, amax } =
                B::fp8_quantize(request.matrix(), cast, axis.orientation(), ScaleFrom::Dynamic);
            let made = rows.or(cols).expect("the orientation that is asked for");
            copy(made, Arc::new(CastResult { scaling: amax.clone(), observed: Some(amax), observation: None }))
        }
    };
    tensor.cache().lock().copies.push((key, Held::Weak(Arc::downgrade(&copy))));
    copy
}

/// Keeps the copies of a cast as the cache's module says, and returns the requested one.
fn keep<B: Float8Backend>(
    request: CastRequest<'_, B>,
    Quantized { rows, cols, .. }: Quantized<B>,
    result: Arc<CastResult<B>>,
) -> Arc<Fp8Copy<B>> {
    let (CastRequest { operand, layer, .. }, key) = (request, request.key());
    let is_weak = operand.role == Role::Input || request.is_transient();
    let (mut wanted, mut copies) = (None, vec![]);
    let mut entries = request.tensor.cache().lock();
    let result = entries.keep(key.cast, result);
    for (axis, made) in [(ContractionAxis::Last, rows), (ContractionAxis::Leading, cols)] {
        let Some(made) = made else { continue };
        let key = CopyKey { operand: Operand { axis, ..operand }, ..key };
        let copy = entries.find(key).unwrap_or_else(|| {
            let copy = Fp8Copy::new(made, key.cast.cast, result.clone(), layer);
            let held = if is_weak { Held::Weak(Arc::downgrade(&copy)) } else { Held::Strong(copy.clone()) };
            entries.copies.push((key, held));
            copy
        });
        if axis == operand.axis {
            wanted = Some(copy.clone());
        }
        copies.push(copy);
    }
    drop(entries);
    if operand.role == Role::Input {
        shared_input_cast::push(Box::new(copies));
    }
    wanted.expect("fp8_quantize returns every orientation that it is asked for")
}

/// A tensor cast as requested, with the scale of other copies of the cast; nothing is kept or counted.
pub(super) fn recast<B: Float8Backend>(request: CastRequest<'_, B>) -> Option<B::Operand> {
    let key = request.key();
    let has_source = request.source().is_some();
    // The scales of the whole weight are not known from some of its rows.
    if has_source && WeightCast::new(request).scales_columns() {
        return None;
    }
    let entries = request.tensor.cache().lock();
    // The copy that a source makes has more rows.
    if !has_source && let Some(copy) = entries.find(key) {
        return Some(copy.operand.clone());
    }
    let scale = match (entries.known(key.cast), key.cast.delayed) {
        (Some(known), _) => ScaleFrom::Amax { amax: known.scaling.clone(), observe: false },
        // Its history is not to be guessed.
        (None, Some(_)) => return None,
        (None, None) => ScaleFrom::Dynamic,
    };
    drop(entries);
    let orientation = request.operand.axis.orientation();
    let Quantized { rows, cols, .. } = B::fp8_quantize(request.matrix(), key.cast.cast, orientation, scale);
    rows.or(cols)
}

#[cfg(all(test, feature = "flex"))]
mod tests {
    use std::panic::{AssertUnwindSafe, catch_unwind};

    use burn::backend::Flex;
    use burn_backend::ops::FloatTensorOps;
    use burn_backend::{FloatDType, TensorMetadata};
    use burn_std::Shape;

    use super::super::{Float8Tensor, Layout};
    use super::*;
    use crate::config::{Float8LinearConfig, Policy};
    use crate::layer::{Layer, LinearPlan};

    /// The next cast finds no lock held, and nothing half made.
    #[test]
    fn a_panic_in_a_cast_poisons_nothing() {
        let ones = Flex::float_ones(Shape::from(vec![3, 5]), &Default::default(), FloatDType::F32);
        let t = Float8Tensor::<Flex>::new(ones);
        let config = Float8LinearConfig::default();
        let layer = Arc::new(Layer::new("layer", Policy::Float8(config.clone()), Arc::default()));
        let plan = LinearPlan::new(&config);
        let request = CastRequest {
            tensor: &t,
            layout: Layout::Matrix,
            operand: Operand::INPUT,
            layer: &layer,
            plan: &plan,
            both: false,
            evaluates: false,
        };
        // It has no third axis.
        let cast = || fp8_copy(CastRequest { layout: Layout::ExpertsAlongN, ..request });
        for _ in 0..2 {
            assert!(catch_unwind(AssertUnwindSafe(cast)).is_err());
        }
        let copy = fp8_copy(request);
        assert_eq!((Flex::fp8_size(&copy.operand).k, layer.live_copies()), (t.shape()[1], 1));
    }
}
