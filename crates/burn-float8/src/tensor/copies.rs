//! [`fp8_copy`]: the FP8 copy of a tensor for a GEMM.
use std::sync::Arc;

use float8_kernels::Orientation;

use super::cache::{CastResult, CopyKey, Fp8Copy, Held};
use super::cast::CastRequest;
use super::codes::Codes;
use super::experts::experts_of;
use super::parallel::{expert_cast, parallel_cast};
use super::shared_input_cast;
use super::source::{CastAmax, WeightCast, sourced_copy};
use crate::backend::{Float8Backend, GivenAmax, Quantized};
use crate::profile::{Work, time};
use crate::terms::{ContractionAxis, Operand, Role};

/// FP8 copy of a tensor for a GEMM, from the tensor's cache or a new cast.
///
/// Threads that race for one tensor may each cast it, with the same codes. They share the first
/// result.
pub(crate) fn fp8_copy<B: Float8Backend>(request: CastRequest<'_, B>) -> Arc<Fp8Copy<B>> {
    let (CastRequest { tensor, operand, layer, plan, both, .. }, key) = (request, request.key());
    let mut entries = tensor.cache().lock();
    entries.copies.retain(|(_, held)| !matches!(held, Held::Weak(weak) if weak.strong_count() == 0));
    if let Some(copy) = entries.find(key) {
        return copy;
    }
    let known = entries.known(key.cast);
    // Releases the lock: a rayon thread that waits for its cast may start another forward that
    // reads this tensor.
    drop(entries);
    if let Some(source) = request.source() {
        return sourced_copy(request, source);
    }
    if let Some(codes) = tensor.codes() {
        return copy_of_codes(codes, request, key);
    }
    if let Some(hooks) = request.parallel() {
        let (quantized, result) = parallel_cast(request, hooks);
        return keep(request, quantized, result);
    }
    if let Some(hooks) = experts_of(layer) {
        let (quantized, result) = expert_cast(request, hooks);
        return keep(request, quantized, result);
    }
    let scale = request.scale(known);
    let is_one_pass = both && !request.is_transient() && plan.is_one_cast(operand);
    let orientation = if is_one_pass { Orientation::Both } else { operand.axis.orientation() };
    let cast = key.cast.cast;
    let timer = time(Work::Cast { role: operand.role, format: cast.format });
    let quantized = B::fp8_quantize(request.matrix(), cast, orientation, scale.given.clone());
    drop(timer);
    layer.count_cast(operand.role);
    let result = scale.result(quantized.amax.clone());
    keep(request, quantized, result)
}

/// Copy of an FP8-only weight for a GEMM, not yet in the cache. Casts must not hold the cache's
/// lock, since pool threads may start other forwards.
///
/// | the GEMM reads | copy | held by |
/// | --- | --- | --- |
/// | wᵀ `[N, K]` in the cast of the codes | the codes | the weight |
/// | w `[K, N]`, if one scale serves both orientations | their transpose | the GEMM |
/// | anything else | a cast of the decoded values | the GEMM |
fn copy_of_codes<B: Float8Backend>(
    codes: &Arc<Codes<B>>,
    request: CastRequest<'_, B>,
    key: CopyKey,
) -> Arc<Fp8Copy<B>> {
    let CastRequest { tensor, operand, layer, .. } = request;
    let cast = key.cast.cast;
    let own = codes.operand_of(cast, operand.axis);
    let is_lasting = own.is_some() && operand.axis == ContractionAxis::Leading;
    let (made, result) = match (own, request.parallel()) {
        (Some(made), _) => (made, codes.result()),
        (None, Some(hooks)) => {
            let (made, CastAmax(result)) = hooks.cast(&WeightCast::new(request));
            (made, result)
        }
        (None, None) => {
            layer.count_cast(operand.role);
            let made = B::fp8_quantize(request.matrix(), cast, operand.axis.orientation(), None);
            let (amax, observation) = (made.amax.clone(), None);
            (made.only(), Arc::new(CastResult { scaling: amax.clone(), observed: Some(amax), observation }))
        }
    };
    let copy = Fp8Copy::new(made, cast, result, layer);
    let held = if is_lasting { Held::Strong(copy.clone()) } else { Held::Weak(Arc::downgrade(&copy)) };
    tensor.cache().lock().copies.push((key, held));
    copy
}

/// Stores the copies of a cast by the rules of the cache, and returns the requested one.
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

/// Casts a tensor as requested, with the scale of other copies of the cast. Stores and counts
/// nothing.
pub(super) fn recast<B: Float8Backend>(request: CastRequest<'_, B>) -> Option<B::Operand> {
    let key = request.key();
    let is_divided = request.source().is_some() || request.layer.divides_tokens();
    // The scales are unknown, since this process has only a part of each.
    if request.divides_rows() || request.source().is_some() && WeightCast::new(request).scales_columns() {
        return None;
    }
    let entries = request.tensor.cache().lock();
    // The copy of a divided tensor has more rows.
    if !is_divided && let Some(copy) = entries.find(key) {
        return Some(copy.operand.clone());
    }
    let scale = match (entries.known(key.cast), key.cast.delayed) {
        (Some(known), _) => Some(GivenAmax { amax: known.scaling.clone(), observe: false }),
        // The scale of a history cannot be guessed.
        (None, Some(_)) => return None,
        (None, None) => None,
    };
    drop(entries);
    let orientation = request.operand.axis.orientation();
    Some(B::fp8_quantize(request.matrix(), key.cast.cast, orientation, scale).only())
}

#[cfg(all(test, feature = "flex"))]
mod tests {
    use std::panic::{AssertUnwindSafe, catch_unwind};

    use burn::backend::Flex;
    use burn_backend::ops::FloatTensorOps;
    use burn_backend::{FloatDType, TensorMetadata};
    use burn_std::Shape;

    use super::super::Float8Tensor;
    use super::super::Layout;
    use super::*;
    use crate::config::{Float8LinearConfig, Policy};
    use crate::layer::{Layer, LinearPlan};

    /// After a panic the next cast finds no held lock and no partial result.
    #[test]
    fn a_panic_in_a_cast_poisons_nothing() {
        let ones = Flex::float_ones(Shape::from(vec![3, 5]), &Default::default(), FloatDType::F32);
        let t = Float8Tensor::<Flex>::new(ones);
        let config = Float8LinearConfig::default();
        let layer = Arc::new(Layer::new("layer", Policy::Float8(config.clone()), Arc::default()));
        let plan = LinearPlan::new(&config);
        let request = CastRequest::new(&t, Operand::INPUT, &layer, &plan);
        // The tensor has no third axis.
        let cast = || fp8_copy(CastRequest { layout: Layout::ExpertsAlongN, ..request });
        for _ in 0..2 {
            assert!(catch_unwind(AssertUnwindSafe(cast)).is_err());
        }
        let copy = fp8_copy(request);
        assert_eq!((Flex::fp8_size(&copy.operand).k, layer.live_copies()), (t.shape()[1], 1));
    }
}
