//! [`Float8State`]: what a run must save so that it continues with the same losses: amax histories and fallbacks.
use std::collections::BTreeMap;
use std::sync::Arc;

use burn::module::Module;
use serde::{Deserialize, Serialize};

use crate::apply::{FoundLinear, linears};
use crate::backend::Float8Ops;
use crate::config::{DelayedScaling, Float8LinearConfig, ScalingType};
use crate::delayed::AmaxState;
use crate::error::Float8Error;
use crate::group::{DeviceState, Group};
use crate::health::Fallback;
use crate::layer::{Along, Layer, Policy, Role};
use crate::tensor::Tag;

/// The state of a model's converted linears: what their casts depend on besides the tensors.
///
/// Without statistics, of no consequence for recipes but `delayed`. Export it between two optimizer steps, with the
/// parameters and the optimizer's record. Restore it after
/// [`Float8Config::apply`](crate::Float8Config::apply) with the same configuration and after loading the parameters, into
/// a new model or into the running one: it replaces what is there.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Float8State {
    /// Optimizer steps begun: decides which steps are sampled.
    pub step: u64,
    /// Whether a linear has read the parameters as they are, in an evaluation: the step that they belong to has begun.
    pub has_begun: bool,
    /// By the linear's path in the module tree; linears without a state are left out.
    pub layers: BTreeMap<String, LayerState>,
}

/// The state of one linear.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct LayerState {
    /// Where the layer was moved, if it was.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fallback: Option<Fallback>,
    /// What its histories were made with; absent without any.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub delayed_scaling: Option<DelayedScaling>,
    /// Its amax history as x.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub input: Option<AmaxState>,
    /// That of w.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub weight: Option<AmaxState>,
    /// That of dy.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub grad_output: Option<AmaxState>,
}

impl LayerState {
    fn amaxes(&self) -> [(Role, &Option<AmaxState>); 3] {
        [(Role::Input, &self.input), (Role::Weight, &self.weight), (Role::GradOutput, &self.grad_output)]
    }
}

/// A converted linear of a model: its path, its layer, the stamp of its weight, and the device's share of its group.
struct Found<B: Float8Ops> {
    path: String,
    layer: Arc<Layer>,
    stamp: u64,
    state: Arc<DeviceState<B::Inner>>,
    device: B::Device,
}

/// The converted linears of a model.
fn find<B: Float8Ops, M: Module<B>>(model: &M) -> Vec<Found<B>> {
    let converted = |FoundLinear { info, device, tag }: FoundLinear<B>| {
        let Tag { layer, stamp } = tag?;
        let state = layer.group().device::<B::Inner>(&B::inner_device(&device));
        Some(Found { path: info.name, layer, stamp, state, device })
    };
    linears::<B, M>(model).into_iter().filter_map(converted).collect()
}

/// Each device's share of each group once.
fn shares<B: Float8Ops>(found: &[Found<B>]) -> Vec<Arc<DeviceState<B::Inner>>> {
    let mut shares: Vec<Arc<DeviceState<B::Inner>>> = vec![];
    for Found { state, .. } in found {
        if !shares.iter().any(|known| Arc::ptr_eq(known, state)) {
            shares.push(state.clone());
        }
    }
    shares
}

impl Float8State {
    /// The state of `model`. Waits for the device.
    pub fn export<B: Float8Ops, M: Module<B>>(model: &M) -> Self {
        let found = find::<B, M>(model);
        let mut exported = Self { has_begun: !found.is_empty(), ..Self::default() };
        for share in shares(&found) {
            let mut steps = share.lock();
            exported.step = exported.step.max(steps.step);
            let own = || found.iter().filter(|f| Arc::ptr_eq(&f.state, &share));
            let has_begun = own().all(|f| f.stamp <= steps.begun_at);
            exported.has_begun &= has_begun;
            if !has_begun {
                // The last step is over, so what its samples say holds.
                steps.samples.resolve();
            }
            let mut histories = steps.histories.export();
            for Found { path, layer, .. } in own() {
                let Some((scaling, mut amaxes)) = histories.remove(layer.name()) else { continue };
                let state = exported.layers.entry(path.clone()).or_default();
                state.delayed_scaling = Some(scaling);
                state.input = amaxes.remove(&Role::Input);
                state.weight = amaxes.remove(&Role::Weight);
                state.grad_output = amaxes.remove(&Role::GradOutput);
            }
        }
        for Found { path, layer, .. } in found {
            if let Some(fallback) = layer.health.fallback() {
                exported.layers.entry(path).or_default().fallback = Some(fallback);
            }
        }
        exported
    }

    /// Puts the state back into a model to which the same configuration was applied.
    ///
    /// # Errors
    ///
    /// [`Float8Error::StateLayer`] and [`Float8Error::StateMismatch`]; nothing is changed then.
    pub fn restore<B: Float8Ops, M: Module<B>>(&self, model: &M) -> Result<(), Float8Error> {
        let found = find::<B, M>(model);
        let by_path = |path: &str| found.iter().find(|f| f.path == path);
        for (path, state) in &self.layers {
            let found = by_path(path).ok_or_else(|| Float8Error::StateLayer { layer: path.clone() })?;
            state.check(path, found.layer.configured())?;
        }
        for share in shares(&found) {
            let mut steps = share.lock();
            steps.histories = Default::default();
            steps.samples.clear();
            steps.step = self.step;
            // A weight built later begins the next step.
            steps.begun_at = if self.has_begun { Tag::now() } else { 0 };
        }
        for Found { layer, .. } in &found {
            layer.configure(layer.configured());
            layer.forget_fprop();
        }
        // Casts that have a row of the history first: those without come after them there.
        let restored = [true, false].into_iter().flat_map(|has_ended| self.layers.iter().map(move |l| (has_ended, l)));
        for (has_ended, (path, state)) in restored {
            let Some(Found { layer, state: share, device, .. }) = by_path(path) else { continue };
            if let (Policy::Float8(config), Some(scaling)) = (layer.configured(), state.delayed_scaling) {
                let device = B::inner_device(device);
                let mut steps = share.lock();
                for (role, amax) in state.amaxes() {
                    if let Some(amax) = amax.as_ref().filter(|amax| amax.scaling_amax.is_some() == has_ended) {
                        let initial = initial_amax(&config, role);
                        steps.histories.restore(layer.name(), role, scaling, amax, initial, &device);
                    }
                }
            }
            if let Some(fallback) = &state.fallback {
                layer.fall_back(fallback.clone());
            }
        }
        Ok(())
    }
}

/// An amax whose scale is 1.
fn initial_amax(config: &Float8LinearConfig, role: Role) -> f32 {
    let casts = [Along::Rows, Along::Cols].map(|along| config.casts().of(role, along));
    casts.iter().find(|cast| !cast.is_disabled()).unwrap_or(&casts[0]).target_dtype.max()
}

/// Whether a cast of this role has a history.
fn is_delayed(config: &Float8LinearConfig, role: Role) -> bool {
    [Along::Rows, Along::Cols].iter().any(|along| config.casts().of(role, *along).scaling_type == ScalingType::Delayed)
}

impl LayerState {
    fn check(&self, path: &str, configured: Policy) -> Result<(), Float8Error> {
        let mismatch = |what: String| Err(Float8Error::StateMismatch { layer: path.into(), what });
        if self.fallback.is_some() && matches!(configured, Policy::HighPrecision(_)) {
            return mismatch("it fell back, and the configuration keeps it in high precision anyway".into());
        }
        for (role, amax) in self.amaxes() {
            let Some(AmaxState { history, scaling_amax, .. }) = amax else { continue };
            let role_name = role.name();
            let config = match &configured {
                Policy::Float8(config) if is_delayed(config, role) => config,
                policy => {
                    return mismatch(format!(
                        "it has an amax history of {role_name}, the configuration none: {policy}"
                    ));
                }
            };
            let expected = config.delayed_scaling();
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

/// Begins an optimizer step, and from now on only this does so for the model and all that share its layers.
///
/// Steps begin by themselves where linears read parameters: the first parameter that an optimizer has built since the last
/// step began is the sign. If a model computes weights in its forward pass from other tensors (weight norm, merged LoRA), or an
/// averaged copy of it is evaluated between steps, every pass would look like a step to delayed scaling and to sampled
/// statistics: call this once before each step then. A weight that is only cast, transposed or multiplied by a number needs
/// no call.
pub fn begin_float8_step<B: Float8Ops, M: Module<B>>(model: &M) {
    let found = find::<B, M>(model);
    let groups: Vec<Arc<Group>> = found.iter().map(|f| f.layer.group()).collect();
    groups.iter().for_each(|group| group.set_manual_steps());
    shares(&found).iter().for_each(|share| share.lock().begin());
}
