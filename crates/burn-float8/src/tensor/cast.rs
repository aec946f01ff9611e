//! Casts: the copy of a tensor that a GEMM reads, made when no clone of the tensor has one.
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use burn_backend::tensor::FloatTensor;
use burn_backend::{FloatDType, TensorMetadata};
use burn_std::Shape;
use float8_kernels::{Granularity, Orientation};

use super::cache::{AmaxOf, CastKey, CastResult, CopyKey, Entries, Fp8Copy, Held, HistoryKey, Layout};
use super::{Float8Tensor, recent};
use crate::backend::{Float8Backend, Quantized, ScaleFrom};
use crate::config::{Float8LinearConfig, ScalingType};
use crate::layer::Layer;
use crate::profile::{Work, time};
use crate::shard::{Amax, Sharding, column_amaxes, tensor_amax};
use crate::step::{DeviceState, Observation};
use crate::terms::{ContractionAxis, Operand, Role};

/// Which cast of a tensor, and for whom.
#[derive(Clone, Copy)]
pub(crate) struct CastRequest<'a> {
    pub(crate) operand: Operand,
    pub(crate) layer: &'a Arc<Layer>,
    pub(crate) config: &'a Float8LinearConfig,
    pub(crate) in_forward: bool,
}

/// As which matrix a tensor is cast: its own, or one that is computed from it when it is needed.
pub(crate) enum View<'a, B: Float8Backend> {
    /// The tensor, in both orientations where that saves a pass.
    Own,
    /// This matrix, in the orientation that is asked for.
    Computed(Layout, &'a dyn Fn() -> FloatTensor<B>),
}

impl<B: Float8Backend> Clone for View<'_, B> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<B: Float8Backend> Copy for View<'_, B> {}

impl<B: Float8Backend> View<'_, B> {
    pub(super) fn of(&self, t: &Float8Tensor<B>) -> FloatTensor<B> {
        match self {
            Self::Own => t.full().clone(),
            Self::Computed(_, compute) => compute(),
        }
    }

    pub(super) fn layout(&self) -> Layout {
        match self {
            Self::Own => Layout::Matrix,
            Self::Computed(layout, _) => *layout,
        }
    }
}

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
    let copy = match entries.find(key) {
        Some(copy) => copy,
        None => entries.make(t, view, request),
    };
    drop(entries);
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
    let is_sharded = request.operand.role == Role::Weight && request.layer.sharding().is_some();
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

/// Whether the scales of a copy are those of the columns of a weight, of which each rank has a part.
fn reads_columns(key: CastKey, operand: Operand) -> bool {
    key.cast.granularity == Granularity::Row && operand.axis == ContractionAxis::Leading
}

/// The amaxes of a sharded weight over all ranks.
fn reduced_amax<B: Float8Backend>(t: &Float8Tensor<B>, of: AmaxOf, sharding: &Sharding) -> FloatTensor<B> {
    sharding.reduce_amax(&own_amax(t, of)).0
}

fn own_amax<B: Float8Backend>(t: &Float8Tensor<B>, of: AmaxOf) -> Amax<B> {
    match of {
        AmaxOf::Tensor => tensor_amax(t.full().clone()),
        AmaxOf::Columns => column_amaxes(t.full().clone()),
    }
}

/// The amaxes of this rank's rows that the casts of a sharded weight need from all ranks, and do not have yet.
pub(crate) fn amaxes_to_reduce<B: Float8Backend>(
    t: &Float8Tensor<B>,
    layer: &Layer,
    config: &Float8LinearConfig,
) -> Vec<(AmaxOf, Amax<B>)> {
    let entries = t.cache().lock();
    let mut wanted = vec![];
    for operand in [Operand::WEIGHT_T, Operand::WEIGHT] {
        let key = cast_key(layer, config, operand);
        let has_history = || {
            let state = DeviceState::<B>::of(layer, &B::float_device(t.full()));
            let scaling_amax = |scaling| state.lock().histories.scaling_amax(layer.name(), Role::Weight, scaling);
            !state.has_left(layer) && key.delayed.is_some_and(|key| scaling_amax(key.scaling).is_some())
        };
        let of = match () {
            _ if config.casts().of(operand).is_disabled() => continue,
            _ if reads_columns(key, operand) => AmaxOf::Columns,
            _ if key.has_one_scale() && entries.result(key).is_none() && !has_history() => AmaxOf::Tensor,
            _ => continue,
        };
        let is_known =
            entries.reduced.iter().map(|(known, _)| *known).chain(wanted.iter().copied()).any(|known| known == of);
        if !is_known {
            wanted.push(of);
        }
    }
    drop(entries);
    wanted.into_iter().map(|of| (of, own_amax(t, of))).collect()
}

fn cast_key(layer: &Layer, config: &Float8LinearConfig, operand: Operand) -> CastKey {
    let is_delayed = config.casts().of(operand).scaling_type == ScalingType::Delayed;
    let history =
        || HistoryKey { scaling: config.delayed_scaling(), conversion: Arc::as_ptr(layer.conversion()) as usize };
    CastKey { cast: config.kernel_cast(operand), delayed: is_delayed.then(history) }
}

impl CastRequest<'_> {
    fn key(&self) -> CastKey {
        cast_key(self.layer, self.config, self.operand)
    }

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
    fn find(&self, key: CopyKey) -> Option<Arc<Fp8Copy<B>>> {
        let (_, held) = self.copies.iter().find(|(k, _)| *k == key)?;
        match held {
            Held::Strong(copy) => Some(copy.clone()),
            Held::Weak(weak) => weak.upgrade(),
        }
    }

    fn result(&self, key: CastKey) -> Option<&Arc<CastResult<B>>> {
        self.results.iter().find(|(k, _)| *k == key).map(|(_, result)| result)
    }

    /// Casts `t`, keeps the copies as the cache's module says, and returns the one that is asked for.
    fn make(&mut self, t: &Float8Tensor<B>, view: View<'_, B>, request: CastRequest<'_>) -> Arc<Fp8Copy<B>> {
        let CastRequest { operand, layer, config, .. } = request;
        if let (Role::Weight, Some(sharding)) = (operand.role, layer.sharding()) {
            return self.make_gathered(t, request, sharding);
        }
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

    /// Casts this rank's rows of a sharded weight, and puts the whole copy together from those of all ranks.
    fn make_gathered(&mut self, t: &Float8Tensor<B>, request: CastRequest<'_>, sharding: &Sharding) -> Arc<Fp8Copy<B>> {
        let CastRequest { operand, layer, config, .. } = request;
        let (cast, device) = (request.key(), B::float_device(t.full()));
        layer.count_cast(operand.role);
        let amax = |of| {
            let known = self.reduced.iter().find(|(known, _)| *known == of).map(|(_, amax)| amax.0.clone());
            move || known.clone().unwrap_or_else(|| reduced_amax(t, of, sharding))
        };
        let (own, columns) = (amax(AmaxOf::Tensor), amax(AmaxOf::Columns));
        let rows = match reads_columns(cast, operand) {
            // One row more with the amax of each column: its scale is then that of the whole column.
            true => {
                let (dtype, n) = (FloatDType::from(t.dtype()), t.shape()[1]);
                let columns = B::float_reshape(columns(), Shape::from(vec![1, n]));
                B::float_cat(vec![t.full().clone(), B::float_cast(columns, dtype)], 0)
            }
            false => t.full().clone(),
        };
        let own_amax: Option<&dyn Fn() -> FloatTensor<B>> = if cast.has_one_scale() { Some(&own) } else { None };
        let orientation = operand.axis.orientation();
        let (Quantized { rows, cols, .. }, result) = self.quantize(t, rows, orientation, request, own_amax);
        let shard = rows.or(cols).expect("the orientation that was asked for");
        let whole = sharding.gather_operand::<B>(&shard, operand.axis, &device);
        let copy = Fp8Copy::new(whole, cast.cast, result, layer);
        let held = match sharding.keeps_gathered() && !config.force_recompute_fp8_weight_in_bwd() {
            true => Held::Strong(copy.clone()),
            false => Held::Weak(Arc::downgrade(&copy)),
        };
        self.copies.push((CopyKey { cast, layout: Layout::Matrix, operand }, held));
        copy
    }

    /// Casts with the scale that the tensor's copies have already, else that of its history, else that of its own amax: of all
    /// ranks' rows where it is sharded.
    fn quantize(
        &mut self,
        t: &Float8Tensor<B>,
        full: FloatTensor<B>,
        orientation: Orientation,
        request: CastRequest<'_>,
        own_amax: Option<&dyn Fn() -> FloatTensor<B>>,
    ) -> (Quantized<B>, Arc<CastResult<B>>) {
        let CastRequest { operand, layer, in_forward, .. } = request;
        let key = request.key();
        let timed = |scale| {
            let _timer = time(Work::Cast { role: operand.role, format: key.cast.format });
            B::fp8_quantize(full, key.cast, orientation, scale)
        };
        // Other granularities have other scales along the other axis.
        let known = self.result(key).filter(|_| key.has_one_scale()).cloned();
        if let Some(known) = known {
            let amax = ScaleFrom::Amax { amax: known.scaling.clone(), observe: false };
            return (timed(amax), known);
        }
        // An x that gradient checkpointing computes again belongs to the history that it had in forward.
        let owner = || match operand.role {
            Role::Input if !in_forward => layer.input_history_owner(),
            _ => layer.name().to_string(),
        };
        let history = key.delayed.map(|HistoryKey { scaling: delayed, .. }| {
            let (state, owner) = (DeviceState::<B>::of(layer, &B::float_device(t.full())), owner());
            let from_history = || state.lock().histories.scaling_amax(&owner, operand.role, delayed);
            let scaling = if state.has_left(layer) { None } else { from_history() };
            (state, owner, delayed, scaling)
        });
        let scaling = history.as_ref().and_then(|(.., scaling)| scaling.clone());
        let from = match &scaling {
            // With one scale the amax is the same whatever the orientation: the first cast observes it.
            Some(amax) => ScaleFrom::Amax { amax: amax.clone(), observe: true },
            None => own_amax.map_or(ScaleFrom::Dynamic, |amax| ScaleFrom::Amax { amax: amax(), observe: false }),
        };
        let quantized = timed(from);
        let observed = quantized.amax.clone();
        let observation = history.map(|(state, layer, delayed, _)| {
            let (initial, amax) = (key.cast.format.max(), observed.clone());
            let (role, is_confirmed) = (operand.role, AtomicBool::new(false));
            Arc::new(Observation { state, layer, role, delayed, initial, amax, is_confirmed })
        });
        let scaling = scaling.unwrap_or_else(|| observed.clone());
        let result = Arc::new(CastResult { scaling, observed: Some(observed), observation });
        match self.results.iter_mut().find(|(k, _)| *k == key) {
            Some((_, known)) => *known = result.clone(),
            None => self.results.push((key, result.clone())),
        }
        (quantized, result)
    }
}

#[cfg(all(test, feature = "flex"))]
mod tests {
    use std::panic::{AssertUnwindSafe, catch_unwind};

    use burn::backend::Flex;
    use burn_backend::ops::FloatTensorOps;

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
