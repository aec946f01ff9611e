//! What the layers of one applied configuration share: its settings, the precision switch, and for each device the
//! optimizer step, the amax histories and the samples of the step.
//!
//! A step begins when a linear meets a weight that was built since the last step began: optimizers build new tensors, and
//! all linears of a step, over all micro-batches, read the same ones. So nothing has to call a `step` function, unless
//! weights are computed in forward ([`begin_float8_step`](crate::begin_float8_step)).
use std::any::{Any, TypeId};
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard};

use burn_backend::tensor::Device;
use burn_backend::{DeviceId, DeviceOps};

use crate::backend::Float8Backend;
use crate::config::Float8Config;
use crate::delayed::Histories;
use crate::health::Samples;
use crate::tensor::Tag;

type Devices = Mutex<HashMap<(TypeId, DeviceId), Arc<dyn Any + Send + Sync>>>;

/// See the module.
#[derive(Default)]
pub(crate) struct Group {
    config: Float8Config,
    strict: AtomicBool,
    /// Whether the precision schedule has switched FP8 off.
    paused: AtomicBool,
    /// Whether steps begin by `begin_float8_step` alone.
    manual_steps: AtomicBool,
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

    pub(crate) fn set_manual_steps(&self) {
        self.manual_steps.store(true, Relaxed);
    }

    /// Notes that a linear meets a weight with this stamp.
    pub(crate) fn meet<B: Float8Backend>(&self, device: &Device<B>, stamp: u64) {
        if !self.manual_steps.load(Relaxed) {
            let state = self.device::<B>(device);
            let mut steps = state.lock();
            if stamp > steps.begun_at {
                steps.begin();
            }
        }
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
        let (histories, samples) = Default::default();
        Self(Mutex::new(Steps { step: 0, begun_at: 0, histories, samples }))
    }
}

/// A device's step and what belongs to it.
pub(crate) struct Steps<B: Float8Backend> {
    /// Optimizer steps begun.
    pub(crate) step: u64,
    /// The newest stamp when the last one began.
    pub(crate) begun_at: u64,
    pub(crate) histories: Histories<B>,
    pub(crate) samples: Samples<B>,
}

impl<B: Float8Backend> DeviceState<B> {
    pub(crate) fn lock(&self) -> MutexGuard<'_, Steps<B>> {
        self.0.lock().unwrap()
    }
}

impl<B: Float8Backend> Steps<B> {
    /// Ends a step and begins the next.
    pub(crate) fn begin(&mut self) {
        self.histories.update();
        self.samples.resolve();
        self.step = self.step.saturating_add(1);
        self.begun_at = Tag::now();
    }

    /// Whether samples are taken in this step. Steps count from 1; a model that is only evaluated stays in its first.
    pub(crate) fn is_sampled(&self, every_n_steps: u64) -> bool {
        self.step.saturating_sub(1).is_multiple_of(every_n_steps)
    }
}
