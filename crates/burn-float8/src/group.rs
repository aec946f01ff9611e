//! What the layers of one applied configuration share: its settings, the precision switch, and for each device the
//! optimizer step, the amax histories and the samples of the step.
//!
//! A step begins when a linear meets a weight that was rebuilt since the linear's last step: optimizers build new tensors,
//! and all linears of a step, over all micro-batches, read the same ones. Nothing has to call a `step` function.
use std::any::{Any, TypeId};
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard};

use burn_backend::tensor::{Device, FloatTensor};
use burn_backend::{DeviceId, DeviceOps};

use crate::backend::Float8Backend;
use crate::config::{DelayedScaling, Float8Config};
use crate::delayed::Histories;
use crate::health::Samples;
use crate::layer::{Along, Layer, Role};

type Devices = Mutex<HashMap<(TypeId, DeviceId), Arc<dyn Any + Send + Sync>>>;

/// See the module.
#[derive(Default)]
pub(crate) struct Group {
    config: Float8Config,
    strict: AtomicBool,
    /// Whether the precision schedule has switched FP8 off.
    paused: AtomicBool,
    devices: Devices,
}

impl Group {
    pub(crate) fn new(config: Float8Config) -> Self {
        Self { strict: AtomicBool::new(config.strict), config, ..Self::default() }
    }

    pub(crate) fn config(&self) -> &Float8Config {
        &self.config
    }

    pub(crate) fn is_strict(&self) -> bool {
        self.strict.load(Relaxed)
    }

    pub(crate) fn set_strict(&self, strict: bool) {
        self.strict.store(strict, Relaxed);
    }

    pub(crate) fn is_paused(&self) -> bool {
        self.paused.load(Relaxed)
    }

    pub(crate) fn set_paused(&self, paused: bool) {
        self.paused.store(paused, Relaxed);
    }

    /// The device's share of the group.
    pub(crate) fn device<B: Float8Backend>(&self, device: &Device<B>) -> Arc<DeviceState<B>> {
        let key = (TypeId::of::<B>(), device.id());
        let new = || Arc::new(DeviceState::<B>::default()) as Arc<dyn Any + Send + Sync>;
        let state = self.devices.lock().unwrap().entry(key).or_insert_with(new).clone();
        state.downcast().expect("keyed by the backend's type")
    }
}

/// See the module.
pub(crate) struct DeviceState<B: Float8Backend>(Mutex<Steps<B>>);

impl<B: Float8Backend> Default for DeviceState<B> {
    fn default() -> Self {
        Self(Mutex::new(Steps {
            step: 0,
            seen: HashMap::new(),
            histories: Histories::default(),
            samples: Samples::default(),
        }))
    }
}

/// A device's step and what belongs to it.
pub(crate) struct Steps<B: Float8Backend> {
    /// Optimizer steps begun.
    pub(crate) step: u64,
    /// The step in which each layer, by name, last met a rebuilt weight.
    seen: HashMap<String, u64>,
    pub(crate) histories: Histories<B>,
    pub(crate) samples: Samples<B>,
}

impl<B: Float8Backend> DeviceState<B> {
    pub(crate) fn lock(&self) -> MutexGuard<'_, Steps<B>> {
        self.0.lock().unwrap()
    }

    /// Notes that `layer` met a weight that no linear has read before.
    pub(crate) fn weight_rebuilt(&self, layer: &Layer) {
        let mut steps = self.lock();
        let seen = steps.seen.get(layer.name()).copied().unwrap_or(0);
        if seen == steps.step {
            // The second rebuilt weight of this layer since the step began: the next step begins.
            steps.histories.update();
            steps.samples.resolve();
            steps.step += 1;
        }
        let step = steps.step;
        steps.seen.insert(layer.name().into(), step);
    }

    /// The amax that a delayed cast is scaled by; none before the first step has ended.
    pub(crate) fn scaling_amax(&self, layer: &Layer, role: Role, scaling: DelayedScaling) -> Option<FloatTensor<B>> {
        self.lock().histories.scaling_amax(layer.name(), role, scaling)
    }

    /// Adds an amax to the step.
    pub(crate) fn observe(&self, layer: &Layer, role: Role, scaling: DelayedScaling, amax: FloatTensor<B>, fmax: f32) {
        self.lock().histories.observe(layer.name(), role, scaling, amax, fmax);
    }

    /// Whether this operand is to be sampled now: it is a step for samples, and the first such operand of the step.
    pub(crate) fn wants_sample(&self, every_n_steps: u64, layer: &Arc<Layer>, role: Role, along: Along) -> bool {
        let mut steps = self.lock();
        // Steps count from 1; a model that is only evaluated stays in its first.
        let due = steps.step.saturating_sub(1).is_multiple_of(every_n_steps);
        due && steps.samples.is_first(layer, role, along)
    }

    /// Continues at a saved step: the next rebuilt weight begins the one after it.
    pub(crate) fn resume(&self, step: u64, layers: impl Iterator<Item = String>) {
        let mut steps = self.lock();
        steps.step = step;
        steps.seen = layers.map(|name| (name, step)).collect();
    }
}
