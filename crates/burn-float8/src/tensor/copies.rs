//! The copy of a tensor that a GEMM reads, made when no clone of the tensor has one.
use std::sync::Arc;

use float8_kernels::Orientation;

use super::cache::{CastResult, CopyKey, Fp8Copy, Held};
use super::cast::{CastRequest, View, quantize};
use super::codes::Codes;
use super::recent;
use super::source::{needs_other_rows, sourced_copy};
use super::wrapped::Float8Tensor;
use crate::backend::{Float8Backend, Quantized, ScaleFrom};
use crate::terms::{ContractionAxis, Operand, Role};

/// The copy of `t` that a GEMM reads, made now if no clone of `t` has one. Threads that race for one tensor may each cast it, to the
/// same codes, and share the first one's.
pub(crate) fn fp8_copy<B: Float8Backend>(
    t: &Float8Tensor<B>,
    view: View<'_, B>,
    request: CastRequest<'_>,
) -> Arc<Fp8Copy<B>> {
    let key = CopyKey { cast: request.key(), layout: view.layout(), operand: request.operand };
    let mut entries = t.cache().lock();
    entries.copies.retain(|(_, held)| !matches!(held, Held::Weak(weak) if weak.strong_count() == 0));
    if let Some(copy) = entries.find(key) {
        return copy;
    }
    if let Some(codes) = t.codes() {
        drop(entries);
        return copy_of_codes(t, codes, view, request, key);
    }
    let known = entries.known(key.cast);
    // Not under the lock: a thread of rayon's pool that waits for the parts of its cast may take up a forward which reads this tensor.
    drop(entries);
    match request.source::<B>() {
        Some(source) => sourced_copy(t, request, source),
        None => make(t, view, request, known),
    }
}

/// The copy of a weight of codes alone that a GEMM reads, which no clone of it has; casts are not made under the cache's lock, since they run
/// in a pool whose threads may take up other forwards.
///
/// | a GEMM reads | what it gets | held |
/// | --- | --- | --- |
/// | wᵀ `[N, K]` in the cast of the codes | the codes | by the weight |
/// | w `[K, N]`, where one scale serves both orientations | their transpose | by the GEMM |
/// | anything else | a cast of the decoded values | by the GEMM |
fn copy_of_codes<B: Float8Backend>(
    t: &Float8Tensor<B>,
    codes: &Arc<Codes<B>>,
    view: View<'_, B>,
    request: CastRequest<'_>,
    key: CopyKey,
) -> Arc<Fp8Copy<B>> {
    let CastRequest { operand, layer, .. } = request;
    let cast = key.cast.cast;
    let is_cast = (cast.format, cast.granularity) == (codes.format, codes.granularity);
    let result = || Arc::new(CastResult { scaling: codes.amax.clone(), observed: None, observation: None });
    let copy = |made, result| Fp8Copy::new(made, cast, result, layer);
    let copy = match operand.axis {
        ContractionAxis::Leading if is_cast => {
            let copy = copy(codes.operand.clone(), result());
            t.cache().lock().copies.push((key, Held::Strong(copy.clone())));
            return copy;
        }
        ContractionAxis::Last if is_cast && codes.serves_both(cast) => copy(B::fp8_transpose(&codes.operand), result()),
        axis => {
            layer.count_cast(operand.role);
            let Quantized { rows, cols, amax } =
                B::fp8_quantize(view.of(t), cast, axis.orientation(), ScaleFrom::Dynamic);
            let made = rows.or(cols).expect("the orientation that is asked for");
            copy(made, Arc::new(CastResult { scaling: amax.clone(), observed: Some(amax), observation: None }))
        }
    };
    t.cache().lock().copies.push((key, Held::Weak(Arc::downgrade(&copy))));
    copy
}

/// Casts `t`, keeps the copies as the cache's module says, and returns the one that is asked for.
fn make<B: Float8Backend>(
    t: &Float8Tensor<B>,
    view: View<'_, B>,
    request: CastRequest<'_>,
    known: Option<Arc<CastResult<B>>>,
) -> Arc<Fp8Copy<B>> {
    let CastRequest { operand, layer, plan, both, .. } = request;
    let is_recast = request.is_transient();
    let orientation = match view {
        View::Own if both && !is_recast && plan.is_one_cast(operand) => Orientation::Both,
        _ => operand.axis.orientation(),
    };
    let cast = request.key();
    let (Quantized { rows, cols, .. }, result) =
        quantize(&t.device(), request, known, None, |scale| B::fp8_quantize(view.of(t), cast.cast, orientation, scale));
    layer.count_cast(operand.role);
    let mut entries = t.cache().lock();
    let result = entries.keep(cast, result);
    let (mut wanted, mut copies) = (None, vec![]);
    for (axis, made) in [(ContractionAxis::Last, rows), (ContractionAxis::Leading, cols)] {
        let Some(made) = made else { continue };
        let key = CopyKey { cast, layout: view.layout(), operand: Operand { axis, ..operand } };
        let copy = entries.find(key).unwrap_or_else(|| {
            let copy = Fp8Copy::new(made, cast.cast, result.clone(), layer);
            let held = if operand.role == Role::Input || is_recast {
                Held::Weak(Arc::downgrade(&copy))
            } else {
                Held::Strong(copy.clone())
            };
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
        recent::push(Box::new(copies));
    }
    wanted.expect("fp8_quantize returns every orientation that it is asked for")
}

/// `t` cast as the request says, with the scale that other copies of the cast have; nothing is kept or counted.
pub(super) fn recast<B: Float8Backend>(
    t: &Float8Tensor<B>,
    view: View<'_, B>,
    request: CastRequest<'_>,
) -> Option<B::Operand> {
    let key = request.key();
    let has_source = request.source::<B>().is_some();
    if has_source && needs_other_rows(t, request) {
        return None;
    }
    let entries = t.cache().lock();
    // The copy that a source makes has more rows.
    if !has_source
        && let Some(copy) = entries.find(CopyKey { cast: key, layout: view.layout(), operand: request.operand })
    {
        return Some(copy.operand.clone());
    }
    let scale = match (entries.known(key), key.delayed) {
        (Some(known), _) => ScaleFrom::Amax { amax: known.scaling.clone(), observe: false },
        // Its history is not to be guessed.
        (None, Some(_)) => return None,
        (None, None) => ScaleFrom::Dynamic,
    };
    drop(entries);
    let Quantized { rows, cols, .. } = B::fp8_quantize(view.of(t), key.cast, request.operand.axis.orientation(), scale);
    rows.or(cols)
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
    use crate::config::{Float8LinearConfig, LinearPlan, Policy};
    use crate::layer::Layer;

    /// The next cast finds no lock held, and nothing half made.
    #[test]
    fn a_panic_in_a_cast_poisons_nothing() {
        let ones = Flex::float_ones(Shape::from(vec![3, 5]), &Default::default(), FloatDType::F32);
        let t = Float8Tensor::<Flex>::new(ones);
        let config = Float8LinearConfig::default();
        let layer = Arc::new(Layer::new("layer", Policy::Float8(config.clone()), Arc::default()));
        let plan = LinearPlan::new(&config);
        let request =
            CastRequest { operand: Operand::INPUT, layer: &layer, plan: &plan, both: false, evaluates: false };
        let panics = || -> FloatTensor<Flex> { panic!("in a cast") };
        let cast = || fp8_copy(&t, View::Computed(Layout::Matrix, &panics), request);
        for _ in 0..2 {
            assert!(catch_unwind(AssertUnwindSafe(cast)).is_err());
        }
        let copy = fp8_copy(&t, View::Own, request);
        assert_eq!((Flex::fp8_size(&copy.operand).k, layer.live_copies()), (t.shape()[1], 1));
    }
}
