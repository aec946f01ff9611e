//! [`Float8State`]: amax histories and fallbacks, which a run must save to resume with the same
//! losses.
use std::collections::BTreeMap;
use std::sync::Arc;

use burn::module::Module;
use burn::record::{PrecisionSettings, Record};
use burn::tensor::backend::Backend;
use serde::{Deserialize, Serialize};

use super::walk::linears;
use crate::config::{DelayedScaling, Policy};
use crate::error::Float8Error;
use crate::layer::{Fallback, Layer, Tag};
use crate::stack::Float8Stack;
use crate::step::{AmaxState, DeviceState, Step, TrackedCast};
use crate::terms::Role;

/// State of a model's converted linears that is not in its tensors: amax histories and fallbacks.
///
/// If several processes train a model together, all of them must export it.
///
/// Without statistics it matters only for the recipe `delayed`. Export it between two optimizer
/// steps, with the parameters and the optimizer's record. Restore it after applying the same
/// configuration ([`Float8Config::apply`](crate::Float8Config::apply)) and loading the parameters.
/// The model may be new or running: the state is replaced.
/// [`Float8StateModule`](crate::Float8StateModule) makes it part of the model's record.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Float8State {
    /// Number of optimizer steps begun. It determines the sampled steps.
    pub step: u64,
    /// Whether the step of the current parameters has begun, since an evaluation already read them.
    pub has_begun: bool,
    /// States by the linear's path in the module tree. Linears without a state are absent.
    pub layers: BTreeMap<String, LayerState>,
}

/// The state of one linear.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct LayerState {
    /// Fallback of the layer, if it was moved.
    pub fallback: Option<Fallback>,
    /// Delayed scaling settings of its histories. Absent without histories.
    pub delayed_scaling: Option<DelayedScaling>,
    /// Amax history of x.
    pub input: Option<AmaxState>,
    /// Amax history of w.
    pub weight: Option<AmaxState>,
    /// Amax history of dy.
    pub grad_output: Option<AmaxState>,
}

impl LayerState {
    fn amax(&self, role: Role) -> Option<&AmaxState> {
        match role {
            Role::Input => self.input.as_ref(),
            Role::Weight => self.weight.as_ref(),
            Role::GradOutput => self.grad_output.as_ref(),
        }
    }
}

impl<B: Backend> Record<B> for Float8State {
    type Item<S: PrecisionSettings> = Self;

    fn into_item<S: PrecisionSettings>(self) -> Self {
        self
    }

    fn from_item<S: PrecisionSettings>(item: Self, _: &B::Device) -> Self {
        item
    }
}

/// [`Converted`] without its backend type.
pub(super) trait States: Send + Sync {
    fn export(&self) -> Float8State;
    fn restore(&self, state: &Float8State) -> Result<(), Float8Error>;
}

/// Converted linears of a model: their paths, and the device states of their conversions.
pub(super) struct Converted<B: Float8Stack>(Vec<ConvertedLinear<B>>);

struct ConvertedLinear<B: Float8Stack> {
    path: String,
    layer: Arc<Layer>,
    state: Arc<DeviceState<B::Inner>>,
    device: B::Device,
}

impl<B: Float8Stack> Converted<B> {
    pub(super) fn of<M: Module<B>>(model: &M) -> Self {
        let found = linears::<B, M>(model, None).into_iter().filter_map(|linear| {
            let (layer, device) = (linear.tag?.layer, linear.device);
            let state = DeviceState::of(&layer, &device);
            Some(ConvertedLinear { path: linear.info.name, layer, state, device })
        });
        Self(found.collect())
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Distinct device states of the conversions.
    fn states(&self) -> Vec<Arc<DeviceState<B::Inner>>> {
        distinct(self.0.iter().map(|found| found.state.clone()))
    }
}

impl<B: Float8Stack> States for Converted<B> {
    /// Exports the state. Waits for the device.
    fn export(&self) -> Float8State {
        let mut exported = Float8State { has_begun: !self.0.is_empty(), ..Float8State::default() };
        for state in self.states() {
            let own = || self.0.iter().filter(|found| Arc::ptr_eq(&found.state, &state));
            let has_begun = own().all(|found| found.layer.built_at() <= state.begun_at());
            let peers = state.peers();
            let mut step = state.lock();
            exported.step = exported.step.max(step.number);
            exported.has_begun &= has_begun;
            if !has_begun {
                // The last step is over, so its samples are final.
                step.samples.resolve(peers.as_deref());
            }
            let Step { number, histories, .. } = &mut *step;
            histories.complete(*number, peers.as_deref());
            let mut histories = histories.export();
            for ConvertedLinear { path, layer, .. } in own() {
                let Some((scaling, mut amaxes)) = histories.remove(layer.name()) else { continue };
                let state = exported.layers.entry(path.clone()).or_default();
                state.delayed_scaling = Some(scaling);
                state.input = amaxes.remove(&Role::Input);
                state.weight = amaxes.remove(&Role::Weight);
                state.grad_output = amaxes.remove(&Role::GradOutput);
            }
        }
        for ConvertedLinear { path, layer, .. } in &self.0 {
            if let Some(fallback) = layer.fallback() {
                exported.layers.entry(path.clone()).or_default().fallback = Some(fallback);
            }
        }
        exported
    }

    fn restore(&self, saved: &Float8State) -> Result<(), Float8Error> {
        let by_path = |path: &str| self.0.iter().find(|found| found.path == path);
        for (path, state) in &saved.layers {
            let found = by_path(path).ok_or_else(|| {
                let what = "the model has no converted linear of this name".into();
                Float8Error::State { layer: path.clone(), what }
            })?;
            state.check(path, &found.layer)?;
        }
        self.states().iter().for_each(|state| state.reset(saved.step, saved.has_begun));
        for ConvertedLinear { layer, .. } in &self.0 {
            layer.configure(Policy::clone(&layer.configured()));
        }
        for (path, saved) in &saved.layers {
            let Some(ConvertedLinear { layer, state, device, .. }) = by_path(path) else { continue };
            for cast in TrackedCast::all_of(layer) {
                if let Some(amax) = saved.amax(cast.role) {
                    state.lock().histories.restore(&cast, amax, device);
                }
            }
            if let Some(fallback) = &saved.fallback {
                layer.fall_back(fallback.clone());
            }
        }
        Ok(())
    }
}

impl Float8State {
    /// Exports the state of `model`. Waits for the device.
    pub fn export<B: Float8Stack, M: Module<B>>(model: &M) -> Self {
        Converted::<B>::of(model).export()
    }

    /// Restores the state of a model that has the same configuration applied.
    ///
    /// # Errors
    ///
    /// [`Float8Error::State`] if the state does not fit the model. The model is unchanged then.
    pub fn restore<B: Float8Stack, M: Module<B>>(&self, model: &M) -> Result<(), Float8Error> {
        Converted::<B>::of(model).restore(self)
    }
}

/// Removes duplicates of shared values.
fn distinct<T>(all: impl Iterator<Item = Arc<T>>) -> Vec<Arc<T>> {
    let mut distinct: Vec<Arc<T>> = vec![];
    for one in all {
        if !distinct.iter().any(|known| Arc::ptr_eq(known, &one)) {
            distinct.push(one);
        }
    }
    distinct
}

impl LayerState {
    fn check(&self, path: &str, layer: &Layer) -> Result<(), Float8Error> {
        let (configured, casts) = (layer.configured(), TrackedCast::all_of(layer));
        let mismatch = |what: String| Err(Float8Error::State { layer: path.into(), what });
        if self.fallback.is_some() && matches!(*configured, Policy::HighPrecision(_)) {
            return mismatch("it fell back, and the configuration keeps it in high precision anyway".into());
        }
        for role in Role::ALL {
            let Some(AmaxState { history, scaling_amax, .. }) = self.amax(role) else { continue };
            let role_name = role.name();
            let Some(&TrackedCast { scaling: expected, .. }) = casts.iter().find(|cast| cast.role == role) else {
                return mismatch(format!(
                    "it has an amax history of {role_name}, the configuration none: {configured}"
                ));
            };
            if self.delayed_scaling != Some(expected) {
                let has = self.delayed_scaling;
                return mismatch(format!("its history was made with {has:?}, the configuration says {expected:?}"));
            }
            let len = if scaling_amax.is_some() { expected.amax_history_len } else { 0 };
            if history.len() != len {
                let has = history.len();
                return mismatch(format!("its history of {role_name} holds {has} steps, not {len}"));
            }
            let amaxes = history.iter().map(|bits| (f32::from_bits(*bits), 0.0));
            let scaling = scaling_amax.iter().map(|bits| (f32::from_bits(*bits), f32::MIN_POSITIVE));
            for (value, least) in amaxes.chain(scaling) {
                if !(least..=f32::MAX).contains(&value) {
                    return mismatch(format!("an amax of {role_name} is {value}"));
                }
            }
        }
        Ok(())
    }
}

/// Begins an optimizer step. After the first call, steps of this model and of all models that share
/// its layers begin only by this call.
///
/// Normally no call is needed. A step begins when a linear reads a parameter built since the last
/// step began, if backward has passed the model since then.
///
/// Call this once before each step if the forward pass computes weights from other tensors (weight
/// norm, merged LoRA) and gradients accumulate over several backward passes. Otherwise delayed
/// scaling and statistics take each backward pass for a step. A weight that is only cast,
/// transposed or multiplied by a number needs no call.
///
/// Also call it before each step if weights of FP8 linears are frozen. A frozen weight never
/// changes, so it begins no step. If all weights are frozen (adapters on a frozen base), the first
/// step never ends. If some are frozen, linears before the first trained one still run in the
/// previous step.
///
/// If backward reaches no FP8 linear, as with an adapter only on the output, delayed scaling takes
/// the amaxes of the last forwards before the call. These may be forwards of an evaluation.
///
/// ```
/// # #[cfg(feature = "flex")] {
/// use burn::backend::{Autodiff, Flex};
/// use burn::module::Module;
/// use burn::nn::{Linear, LinearConfig};
/// use burn::tensor::Tensor;
/// use burn_float8::{Float8, Float8Config, Float8State, begin_float8_step, lora::LoraConfig};
///
/// type B = Float8<Autodiff<Flex>>;
/// let device = Default::default();
/// let model: Linear<B> = LinearConfig::new(64, 32).init(&device);
/// let (model, _) = Float8Config::tensorwise().apply(model).unwrap();
/// let model = model.no_grad();
/// let lora = LoraConfig::default().init(&model, 0).unwrap();
/// for _ in 0..3 {
///     begin_float8_step(&model);
///     let x = Tensor::<B, 2>::ones([8, 64], &device);
///     lora.attach(model.clone(), None).forward(x).mean().backward();
/// }
/// assert_eq!(Float8State::export::<B, _>(&model).step, 3);
/// # }
/// ```
pub fn begin_float8_step<B: Float8Stack, M: Module<B>>(model: &M) {
    let mut states = vec![];
    for linear in linears::<B, M>(model, None) {
        let (Some(Tag { layer, .. }), Some(weight)) = (linear.tag, linear.weight) else { continue };
        layer.applied().set_manual_steps();
        let state = DeviceState::<B::Inner>::of(&layer, &linear.device);
        // Copies of a frozen weight, or of a new weight read by an evaluation, have the scale of
        // the step that ends.
        B::float8_tensor(&weight).forget_delayed();
        states.push(state);
    }
    distinct(states.into_iter()).iter().for_each(|state| state.begin());
}
