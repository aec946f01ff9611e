//! What is known of a layer's casts: the last amax and scale, always, since they are on the device anyway; and on sampled
//! steps how well the codes represent the tensor, by which a layer may be moved out of FP8.
use std::collections::{BTreeMap, HashSet};
use std::sync::{Arc, Mutex, Weak};

use burn_backend::TensorMetadata;
use burn_backend::tensor::FloatTensor;
use float8_kernels::{Cast, Health, Orientation, reference};
use serde::{Deserialize, Serialize};

use crate::backend::{Float8Backend, ScaleFrom};
use crate::config::{FallbackConfig, FallbackTo, Float8LinearConfig, Recipe};
use crate::copies::Amaxes;
use crate::host::read_f32;
use crate::layer::{Along, Layer, Policy, Reason, Role};
use crate::tensor::Float8Tensor;

/// How well FP8 codes represent the tensor that they were cast from.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct CastHealth {
    /// `10 log10(Σ x² / Σ (x − x̂)²)` over finite elements, dB; none if x is zero or the sums are not finite, infinite if
    /// nothing was lost.
    pub sqnr_db: Option<f64>,
    /// Share of elements beyond the format's range, `|x · scale| > FMAX`.
    pub saturated: f64,
    /// Share of elements that are not zero but have a zero code.
    pub flushed: f64,
    /// Infinities and NaN.
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

/// The last cast of an operand.
type LastCast = (Cast, Arc<dyn ReadAmax>);

/// What a layer knows of its operands.
#[derive(Default)]
pub(crate) struct LayerHealth {
    last: Mutex<[Option<LastCast>; 3]>,
    sampled: Mutex<BTreeMap<(Role, Along), OperandHealth>>,
    fallback: Mutex<Option<Fallback>>,
}

impl LayerHealth {
    pub(crate) fn set_last(&self, role: Role, cast: Cast, amaxes: Arc<dyn ReadAmax>) {
        self.last.lock().unwrap()[role as usize] = Some((cast, amaxes));
    }

    /// The last amax and scale of a role; this waits for the device.
    pub(crate) fn last(&self, role: Role) -> Option<(Option<f32>, f32)> {
        let last = self.last.lock().unwrap()[role as usize].clone();
        let (cast, amaxes) = last?;
        let (observed, scaling) = amaxes.read();
        Some((observed, reference::amax_to_scale(scaling, cast.format, cast.scale_mode).get()))
    }

    pub(crate) fn sampled(&self) -> BTreeMap<(Role, Along), OperandHealth> {
        self.sampled.lock().unwrap().clone()
    }

    pub(crate) fn fallback(&self) -> Option<Fallback> {
        self.fallback.lock().unwrap().clone()
    }

    pub(crate) fn clear_fallback(&self) {
        *self.fallback.lock().unwrap() = None;
    }
}

impl Layer {
    /// Moves the layer out of its recipe.
    pub(crate) fn fall_back(&self, fallback: Fallback) {
        self.set_policy(match fallback.to {
            FallbackTo::HighPrecision => Policy::HighPrecision(Reason::Fallback(fallback.reason.clone())),
            FallbackTo::Rowwise => Policy::Float8(Float8LinearConfig::new(Recipe::Rowwise)),
        });
        *self.health.fallback.lock().unwrap() = Some(fallback);
    }
}

/// Statistics of the step under way, still on the device.
pub(crate) struct Samples<B: Float8Backend> {
    seen: HashSet<(usize, Role, Along)>,
    pending: Vec<Sample<B>>,
}

struct Sample<B: Float8Backend> {
    /// The layer owns its group, and that this sample.
    layer: Weak<Layer>,
    role: Role,
    along: Along,
    step: u64,
    elements: u64,
    /// The cast that ran, then one for each recipe to compare with.
    partials: Vec<(Option<Recipe>, FloatTensor<B>)>,
}

impl<B: Float8Backend> Default for Samples<B> {
    fn default() -> Self {
        Self { seen: HashSet::new(), pending: vec![] }
    }
}

impl<B: Float8Backend> Samples<B> {
    pub(crate) fn is_first(&mut self, layer: &Arc<Layer>, role: Role, along: Along) -> bool {
        self.seen.insert((Arc::as_ptr(layer) as usize, role, along))
    }

    /// Ends the step: reads the samples, which waits for the device if there are any, and moves layers that crossed limits.
    pub(crate) fn resolve(&mut self) {
        self.read();
        self.seen.clear();
    }

    /// Reads the samples taken so far.
    pub(crate) fn read(&mut self) {
        for Sample { layer, role, along, step, elements, partials } in core::mem::take(&mut self.pending) {
            let mut health = partials.into_iter().map(|(recipe, partials)| {
                (recipe, CastHealth::from(Health::from_partials(elements, &read_f32::<B>(partials))))
            });
            let (_, cast) = health.next().expect("the cast that ran comes first");
            let compare = health.filter_map(|(recipe, health)| Some((recipe?, health))).collect();
            let Some(layer) = layer.upgrade() else { continue };
            if let Some(limits) = layer.group().config().fallback {
                check(&layer, role, step, &cast, limits);
            }
            layer.health.sampled.lock().unwrap().insert((role, along), OperandHealth { step, cast, compare });
        }
    }
}

/// Moves a layer whose operand is beyond a limit, and says so once.
fn check(layer: &Layer, role: Role, step: u64, health: &CastHealth, limits: FallbackConfig) {
    let moved = layer.health.fallback();
    let to = match (&moved, limits.to) {
        (None, to) => to,
        // Rowwise was not enough.
        (Some(Fallback { to: FallbackTo::Rowwise, step: then, .. }), _) if step > *then => FallbackTo::HighPrecision,
        (Some(_), _) => return,
    };
    let FallbackConfig { min_sqnr_db, max_saturated, max_flushed, .. } = limits;
    let role = role.name();
    let low = min_sqnr_db.zip(health.sqnr_db).filter(|(limit, value)| value < limit);
    let saturated = max_saturated.filter(|limit| health.saturated > *limit);
    let flushed = max_flushed.filter(|limit| health.flushed > *limit);
    let reason = match (low, saturated, flushed) {
        (Some((limit, value)), _, _) => format!("SQNR of {role} {value:.1} dB, limit {limit} dB"),
        (_, Some(limit), _) => {
            format!("{:.3}% of {role} saturated, limit {}%", 100.0 * health.saturated, 100.0 * limit)
        }
        (_, _, Some(limit)) => {
            format!("{:.3}% of {role} flushed to zero, limit {}%", 100.0 * health.flushed, 100.0 * limit)
        }
        _ => return,
    };
    let place = match to {
        FallbackTo::HighPrecision => "high precision",
        FallbackTo::Rowwise => "rowwise",
    };
    println!("Float8: {} moved to {place} after step {step}: {reason}", layer.name());
    layer.fall_back(Fallback { step, to, reason });
}

/// Samples an operand if the layer's statistics ask for it now.
pub(crate) fn sample<B: Float8Backend>(
    t: &Float8Tensor<B>,
    role: Role,
    along: Along,
    operand: &B::Operand,
    layer: &Arc<Layer>,
) {
    let group = layer.group();
    let Some(statistics) = &group.config().statistics else { return };
    let state = group.device::<B>(&B::float_device(t.full()));
    if !state.wants_sample(statistics.every_n_steps, layer, role, along) {
        return;
    }
    let transposed = along == Along::Cols;
    let health = |operand: &B::Operand| B::fp8_health(t.full().clone(), operand, transposed);
    let mut partials = vec![(None, health(operand))];
    for recipe in &statistics.compare {
        let config = Float8LinearConfig::new(*recipe);
        let cast = config.casts().of(role, along);
        if cast.is_disabled() {
            continue;
        }
        let orientation = if transposed { Orientation::Cols } else { Orientation::Rows };
        let cast = cast.kernel_cast(config.scale_mode());
        let copies = B::fp8_quantize(t.full().clone(), cast, orientation, ScaleFrom::Own);
        let operand = if transposed { copies.cols } else { copies.rows };
        partials.push((Some(*recipe), health(&operand.expect("the orientation that was asked for"))));
    }
    let elements = t.shape().num_elements() as u64;
    let mut steps = state.lock();
    let step = steps.step;
    steps.samples.pending.push(Sample { layer: Arc::downgrade(layer), role, along, step, elements, partials });
}
