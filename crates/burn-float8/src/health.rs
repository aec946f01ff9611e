//! What is known of a layer's casts: the last amax and scale, always, since they are on the device anyway; and on sampled
//! steps how well the codes represent the tensor, by which a layer may be moved out of FP8.
use std::any::Any;
use std::collections::{BTreeMap, HashSet};
use std::sync::{Arc, Mutex, Weak};

use burn_backend::tensor::{Device, FloatTensor};
use float8_kernels::{Cast, Granularity, Health, reference};
use serde::{Deserialize, Serialize, Serializer};

use crate::backend::{Float8Backend, ScaleFrom};
use crate::config::{FallbackConfig, FallbackTo, Float8LinearConfig, Recipe};
use crate::copies::{Amaxes, CastOf};
use crate::host::read_f32;
use crate::layer::{Along, Layer, Policy, Reason, Role};

/// How well FP8 codes represent the tensor that they were cast from.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct CastHealth {
    /// `10 log10(Σ x² / Σ (x − x̂)²)` over finite elements, dB; none if x is zero or the sums are not finite, infinite if
    /// nothing was lost.
    #[serde(serialize_with = "or_name")]
    pub sqnr_db: Option<f64>,
    /// Share of elements beyond the format's range, `|x · scale| > FMAX`.
    pub saturated: f64,
    /// Share of elements that are not zero but have a zero code.
    pub flushed: f64,
    /// Elements that are infinite or NaN, or whose codes stand for such.
    pub non_finite: u64,
}

impl From<Health> for CastHealth {
    fn from(health: Health) -> Self {
        Self {
            sqnr_db: health.sqnr_db(),
            saturated: health.saturated_share(),
            flushed: health.flushed_share(),
            non_finite: health.non_finite,
        }
    }
}

/// A number, or the name of what JSON has no number for: `inf`, `-inf`, `NaN`.
pub(crate) fn or_name<T: Copy + Into<f64> + Serialize, S: Serializer>(x: &Option<T>, s: S) -> Result<S::Ok, S::Error> {
    match x {
        Some(x) if !(*x).into().is_finite() => s.serialize_str(&(*x).into().to_string()),
        x => x.serialize(s),
    }
}

/// One operand of a layer in one sampled step.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct OperandHealth {
    /// The optimizer step, counted from 1.
    pub step: u64,
    /// The cast that ran.
    pub cast: CastHealth,
    /// The same tensor by other recipes.
    pub compare: Vec<(Recipe, CastHealth)>,
}

/// A layer that statistics have moved out of its recipe.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Fallback {
    /// The optimizer step after which it happened.
    pub step: u64,
    /// Where the layer went.
    pub to: FallbackTo,
    /// The limit and the value that crossed it.
    pub reason: String,
}

/// Reads the observed amax and the amax that the scale was made of.
pub(crate) trait ReadAmax: Send + Sync {
    fn read(&self) -> (Option<f32>, f32);
}

impl<B: Float8Backend> ReadAmax for Amaxes<B> {
    fn read(&self) -> (Option<f32>, f32) {
        let max = |t: &FloatTensor<B>| reference::amax(&read_f32::<B>(t.clone()));
        (self.observed.as_ref().map(max), max(&self.scaling))
    }
}

/// A copy of an operand: of x, w or dy, for the GEMM that contracts this axis.
pub(crate) type CopyOf = (Role, Along);

/// The last cast of a copy.
type LastCast = (Cast, Arc<dyn ReadAmax>);

/// What a layer knows of its operands.
#[derive(Default)]
pub(crate) struct LayerHealth {
    last: Mutex<BTreeMap<CopyOf, LastCast>>,
    sampled: Mutex<BTreeMap<CopyOf, OperandHealth>>,
    fallback: Mutex<Option<Fallback>>,
    /// Samples of what fprop has read, a `Vec<Sample<B>>`.
    stash: Mutex<Option<Box<dyn Any + Send>>>,
}

impl LayerHealth {
    pub(crate) fn set_last(&self, role: Role, along: Along, cast: Cast, amaxes: Arc<dyn ReadAmax>) {
        self.last.lock().unwrap().insert((role, along), (cast, amaxes));
    }

    /// The last amax and scale of a copy; this waits for the device.
    pub(crate) fn last(&self, copy: CopyOf) -> (Option<f32>, Option<f32>) {
        let last = self.last.lock().unwrap().get(&copy).cloned();
        let Some((cast, amaxes)) = last else { return (None, None) };
        let (observed, scaling) = amaxes.read();
        (observed, Some(reference::amax_to_scale(scaling, cast.format, cast.scale_mode).get()))
    }

    /// The statistics of a copy; those of the other copy where both are one cast, which is sampled once.
    pub(crate) fn sampled(&self, (role, along): CopyOf) -> Option<OperandHealth> {
        let sampled = self.sampled.lock().unwrap();
        let other = || {
            let last = self.last.lock().unwrap();
            let cast = |along| last.get(&(role, along)).map(|(cast, _)| *cast);
            let same = one_cast(cast(along)?) && cast(along) == cast(along.other());
            same.then(|| sampled.get(&(role, along.other()))).flatten()
        };
        sampled.get(&(role, along)).or_else(other).cloned()
    }

    pub(crate) fn fallback(&self) -> Option<Fallback> {
        self.fallback.lock().unwrap().clone()
    }

    pub(crate) fn set_fallback(&self, fallback: Option<Fallback>) {
        *self.fallback.lock().unwrap() = fallback;
    }
}

/// Whether both orientations of a tensor have the same codes, and so the same statistics.
fn one_cast(cast: Cast) -> bool {
    matches!(cast.granularity, Granularity::Tensor | Granularity::Block128x128)
}

impl Layer {
    /// Moves the layer out of its recipe.
    pub(crate) fn fall_back(&self, fallback: Fallback) {
        self.override_policy(match (fallback.to, self.configured()) {
            (FallbackTo::Rowwise, Policy::Float8(config)) => Policy::Float8(config.with_recipe(Recipe::Rowwise)),
            _ => Policy::HighPrecision(Reason::Fallback(fallback.reason.clone())),
        });
        self.health.set_fallback(Some(fallback));
    }
}

/// Statistics of the step under way.
pub(crate) struct Samples<B: Float8Backend> {
    seen: HashSet<(usize, CopyOf)>,
    /// Still on the device.
    pending: Vec<Sample<B>>,
    /// Read, and to be checked against limits when the step ends.
    unchecked: Vec<(Weak<Layer>, Role, u64, CastHealth)>,
}

struct Sample<B: Float8Backend> {
    /// The layer owns its group, and that this sample.
    layer: Weak<Layer>,
    copy: CopyOf,
    step: u64,
    elements: u64,
    /// The cast that ran, then one for each recipe to compare with.
    partials: Vec<(Option<Recipe>, FloatTensor<B>)>,
}

impl<B: Float8Backend> Default for Samples<B> {
    fn default() -> Self {
        Self { seen: HashSet::new(), pending: vec![], unchecked: vec![] }
    }
}

impl<B: Float8Backend> Samples<B> {
    /// Ends the step: reads the samples, which waits for the device if there are any, and moves layers that crossed limits.
    pub(crate) fn resolve(&mut self) {
        self.read();
        self.seen.clear();
        for (layer, role, step, health) in core::mem::take(&mut self.unchecked) {
            let Some(layer) = layer.upgrade() else { continue };
            if let Some(limits) = layer.group().config().fallback {
                check(&layer, role, step, &health, limits);
            }
        }
    }

    fn push(&mut self, layer: &Arc<Layer>, sample: Sample<B>) {
        if self.seen.insert((Arc::as_ptr(layer) as usize, sample.copy)) {
            self.pending.push(sample);
        }
    }

    /// Reads the samples taken so far.
    pub(crate) fn read(&mut self) {
        for Sample { layer, copy, step, elements, partials } in core::mem::take(&mut self.pending) {
            let mut health = partials.into_iter().map(|(recipe, partials)| {
                (recipe, CastHealth::from(Health::from_partials(elements, &read_f32::<B>(partials))))
            });
            let (_, cast) = health.next().expect("the cast that ran comes first");
            let compare = health.filter_map(|(recipe, health)| Some((recipe?, health))).collect();
            if let Some(layer) = layer.upgrade() {
                layer.health.sampled.lock().unwrap().insert(copy, OperandHealth { step, cast, compare });
            }
            self.unchecked.push((layer, copy.0, step, cast));
        }
    }

    /// Forgets everything, for a state that is restored.
    pub(crate) fn clear(&mut self) {
        *self = Self::default();
    }
}

/// Moves a layer whose operand is beyond a limit, and says so once.
fn check(layer: &Layer, role: Role, step: u64, health: &CastHealth, limits: FallbackConfig) {
    let moved = layer.health.fallback();
    let is_rowwise = matches!(layer.policy(), Policy::Float8(config) if config.casts() == &Recipe::Rowwise.casts());
    let to = match (&moved, limits.to) {
        (None, FallbackTo::Rowwise) if is_rowwise => FallbackTo::HighPrecision,
        (None, to) => to,
        // Rowwise was not enough.
        (Some(Fallback { to: FallbackTo::Rowwise, step: then, .. }), _) if step > *then => FallbackTo::HighPrecision,
        (Some(_), _) => return,
    };
    let FallbackConfig { min_sqnr_db, max_saturated, max_flushed, max_non_finite, .. } = limits;
    let (role, share) = (role.name(), |share: f64| format!("{:.3}%", 100.0 * share));
    let low = min_sqnr_db.zip(health.sqnr_db).filter(|(limit, value)| value < limit);
    let saturated = max_saturated.filter(|limit| health.saturated > *limit);
    let flushed = max_flushed.filter(|limit| health.flushed > *limit);
    let non_finite = max_non_finite.filter(|limit| health.non_finite > *limit);
    let reason = match (low, saturated, flushed, non_finite) {
        (Some((limit, value)), ..) => format!("SQNR of {role} {value:.1} dB, limit {limit} dB"),
        (_, Some(limit), ..) => format!("{} of {role} saturated, limit {}%", share(health.saturated), 100.0 * limit),
        (_, _, Some(limit), _) => {
            format!("{} of {role} flushed to zero, limit {}%", share(health.flushed), 100.0 * limit)
        }
        (.., Some(limit)) => format!("{} elements of {role} not finite, limit {limit}", health.non_finite),
        _ => return,
    };
    let place = match to {
        FallbackTo::HighPrecision => "high precision",
        FallbackTo::Rowwise => "rowwise",
    };
    println!("Float8: {} moved to {place} after step {step}: {reason}", layer.name());
    layer.fall_back(Fallback { step, to, reason });
}

/// Forgets what an fprop has left that no backward has followed.
pub(crate) fn forget(layer: &Layer) {
    layer.health.stash.lock().unwrap().take();
}

/// Takes the samples of what fprop has read: backward has come to this layer.
pub(crate) fn confirm<B: Float8Backend>(device: &Device<B>, layer: &Arc<Layer>) {
    let stash = layer.health.stash.lock().unwrap().take();
    let Some(samples) = stash.and_then(|stash| stash.downcast::<Vec<Sample<B>>>().ok()) else { return };
    let state = layer.group().device::<B>(device);
    let mut steps = state.lock();
    let step = steps.step;
    for sample in *samples {
        // A step may have begun since.
        if sample.step == step {
            steps.samples.push(layer, sample);
        }
    }
}

/// Whether this copy is to be sampled now: it is a step for samples, and neither this copy nor the other one of the same
/// codes has been sampled in it.
fn is_due<B: Float8Backend>(device: &Device<B>, CastOf { role, along, layer, .. }: CastOf<'_>) -> bool {
    let group = layer.group();
    let Some(statistics) = &group.config().statistics else { return false };
    let state = group.device::<B>(device);
    let steps = state.lock();
    let Policy::Float8(config) = layer.policy() else { return false };
    let cast = |along| config.casts().of(role, along);
    let one = one_cast(config.kernel_cast(role, along)) && cast(along) == cast(along.other());
    let seen = |along| steps.samples.seen.contains(&(Arc::as_ptr(layer) as usize, (role, along)));
    steps.is_sampled(statistics.every_n_steps) && !seen(along) && !(one && seen(along.other()))
}

/// Samples a copy if the layer's statistics ask for it now: for good in backward, and in forward until backward shows that
/// it was no evaluation. Shares are of so many elements.
pub(crate) fn sample<B: Float8Backend>(
    full: impl FnOnce() -> FloatTensor<B>,
    elements: u64,
    device: &Device<B>,
    of: CastOf<'_>,
    operand: &B::Operand,
    in_forward: bool,
) {
    let CastOf { role, along, layer, .. } = of;
    if !is_due::<B>(device, of) {
        return;
    }
    let full = full();
    let group = layer.group();
    let Some(statistics) = &group.config().statistics else { return };
    let transposed = along == Along::Cols;
    let health = |operand: &B::Operand| B::fp8_health(full.clone(), operand, transposed);
    let mut partials = vec![(None, health(operand))];
    for recipe in &statistics.compare {
        let config = Float8LinearConfig::new(*recipe);
        if config.casts().of(role, along).is_disabled() {
            continue;
        }
        let copies =
            B::fp8_quantize(full.clone(), config.kernel_cast(role, along), along.orientation(), ScaleFrom::Own);
        let operand = if transposed { copies.cols } else { copies.rows };
        partials.push((Some(*recipe), health(&operand.expect("the orientation that was asked for"))));
    }
    let state = group.device::<B>(device);
    let mut steps = state.lock();
    let step = steps.step;
    let sample = Sample { layer: Arc::downgrade(layer), copy: (role, along), step, elements, partials };
    if in_forward {
        let mut stash = layer.health.stash.lock().unwrap();
        let mut samples = stash.take().and_then(|stash| stash.downcast::<Vec<Sample<B>>>().ok()).unwrap_or_default();
        samples.push(sample);
        *stash = Some(samples);
    } else {
        steps.samples.push(layer, sample);
    }
}
