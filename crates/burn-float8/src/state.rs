//! [`Float8State`]: what a run must save so that it continues with the same losses: amax histories and fallbacks.
use std::collections::BTreeMap;

use burn::module::Module;
use serde::{Deserialize, Serialize};

use crate::apply::Linears;
use crate::backend::Float8Ops;
use crate::delayed::AmaxState;
use crate::error::Float8Error;
use crate::health::Fallback;
use crate::layer::{Along, Layer, Policy, Role};

/// The state of a model's converted linears: what their casts depend on besides the tensors.
///
/// Empty for every recipe but `delayed` while no fallback happened. Export it between two optimizer steps, with the
/// parameters and the optimizer's record; restore it after [`Float8Config::apply`](crate::Float8Config::apply) with the same
/// configuration.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Float8State {
    /// Optimizer steps begun: decides which steps are sampled.
    pub step: u64,
    /// By the layer's name; layers without a state are left out.
    pub layers: BTreeMap<String, LayerState>,
}

/// The state of one linear.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct LayerState {
    /// Where the layer was moved, if it was.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fallback: Option<Fallback>,
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
    fn amaxes(&mut self) -> [(Role, &mut Option<AmaxState>); 3] {
        [(Role::Input, &mut self.input), (Role::Weight, &mut self.weight), (Role::GradOutput, &mut self.grad_output)]
    }
}

impl Float8State {
    /// The state of `model`. Waits for the device.
    pub fn export<B: Float8Ops, M: Module<B>>(model: &M) -> Self {
        let Linears { layers, device, .. } = Linears::<B>::of(model);
        let mut state = Self::default();
        let (Some(first), Some(device)) = (layers.first(), device) else { return state };
        let shared = first.group().device::<B::Inner>(&B::inner_device(&device));
        let mut steps = shared.lock();
        steps.samples.read();
        state.step = steps.step;
        for (name, amaxes) in steps.histories.export() {
            let layer = state.layers.entry(name).or_default();
            for (role, amax) in layer.amaxes() {
                *amax = amaxes.get(&role).cloned();
            }
        }
        for layer in layers {
            if let Some(fallback) = layer.health.fallback() {
                state.layers.entry(layer.name().into()).or_default().fallback = Some(fallback);
            }
        }
        state
    }

    /// Puts the state back into a model to which the same configuration was applied.
    ///
    /// # Errors
    ///
    /// [`Float8Error::StateLayer`] and [`Float8Error::StateMismatch`]; nothing is changed then.
    pub fn restore<B: Float8Ops, M: Module<B>>(&self, model: &M) -> Result<(), Float8Error> {
        let Linears { layers, device, .. } = Linears::<B>::of(model);
        let find = |name: &str| layers.iter().find(|l| l.name() == name);
        for (name, state) in &self.layers {
            let layer = find(name).ok_or_else(|| Float8Error::StateLayer { layer: name.clone() })?;
            state.clone().check(layer)?;
        }
        let (Some(first), Some(device)) = (layers.first(), device) else { return Ok(()) };
        let device = B::inner_device(&device);
        let shared = first.group().device::<B::Inner>(&device);
        for (name, state) in &self.layers {
            let layer = find(name).expect("checked above");
            if let Policy::Float8(config) = layer.policy() {
                let mut steps = shared.lock();
                for (role, amax) in state.clone().amaxes() {
                    let Some(amax) = amax else { continue };
                    let initial = config.casts().of(role, Along::Rows).target_dtype.max();
                    steps.histories.restore(name, role, config.delayed_scaling(), amax, initial, &device);
                }
            }
            if let Some(fallback) = &state.fallback {
                layer.fall_back(fallback.clone());
            }
        }
        shared.resume(self.step, layers.iter().map(|l| l.name().to_string()));
        Ok(())
    }
}

impl LayerState {
    fn check(mut self, layer: &Layer) -> Result<(), Float8Error> {
        let mismatch = |what: String| Float8Error::StateMismatch { layer: layer.name().into(), what };
        for (role, amax) in self.amaxes() {
            let Some(AmaxState { history, scaling_amax, .. }) = amax else { continue };
            let role = role.name();
            let Policy::Float8(config) = layer.policy() else {
                return Err(mismatch(format!("it has an amax history of {role}, and the layer is in high precision")));
            };
            let len = config.delayed_scaling().amax_history_len;
            if scaling_amax.is_some() != (history.len() == len) || (scaling_amax.is_none() && !history.is_empty()) {
                let has = history.len();
                return Err(mismatch(format!("its history of {role} holds {has} steps, the configuration says {len}")));
            }
        }
        Ok(())
    }
}
