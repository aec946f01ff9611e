//! Optimizer step, amax histories and statistics of a device, for the layers of one applied
//! configuration.
//!
//! A step begins when a linear reads a weight built since the last step began, if backward has
//! passed a layer since then. Optimizers build new tensors after a backward pass, and all linears
//! of a step, over all micro-batches, read the same ones. Weights computed in forward are new in
//! every pass, but only the first of them follows a backward pass.
//!
//! Programs therefore need no `step` call, with two exceptions: frozen weights, and weights
//! computed in forward together with gradient accumulation
//! ([`begin_float8_step`](crate::begin_float8_step)).
mod amax_state;
mod delayed;
mod peers;
mod samples;
mod without_backward;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};

use burn_backend::DeviceOps;
use burn_backend::tensor::{Device, FloatTensor};
use parking_lot::{Mutex, MutexGuard};

use crate::backend::Float8Backend;
use crate::config::DelayedScaling;
use crate::layer::{Layer, Tag, now};
use crate::terms::Role;
pub use amax_state::AmaxState;
pub(crate) use delayed::{Histories, Observation};
pub use peers::PeerExchange;
pub(crate) use peers::{Peers, TrackedCast};
pub(crate) use samples::{Sample, Samples};
pub(crate) use without_backward::Observed;

/// State shared by the layers of one applied configuration on one device.
pub(crate) struct DeviceState<B: Float8Backend> {
    /// Newest stamp when the last step began.
    begun_at: AtomicU64,
    /// Whether backward has passed a layer since then.
    has_backward: AtomicBool,
    step: Mutex<Step<B>>,
    /// Processes that end steps together with this one.
    peers: Mutex<Option<Arc<Peers<B>>>>,
}

/// The current step.
#[derive(Default)]
pub(crate) struct Step<B: Float8Backend> {
    /// Number of optimizer steps begun.
    pub(crate) number: u64,
    pub(crate) histories: Histories<B>,
    pub(crate) samples: Samples<B>,
}

impl<B: Float8Backend> Default for DeviceState<B> {
    fn default() -> Self {
        // The first weight that a linear reads begins the first step.
        Self {
            begun_at: AtomicU64::new(0),
            has_backward: AtomicBool::new(true),
            step: Mutex::default(),
            peers: Mutex::default(),
        }
    }
}

impl<B: Float8Backend> DeviceState<B> {
    /// State of a layer's applied configuration on a device.
    pub(crate) fn of(layer: &Layer, device: &Device<B>) -> Arc<Self> {
        layer.applied().state(device.id())
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, Step<B>> {
        self.step.lock()
    }

    /// Processes that end steps together with this one.
    pub(crate) fn peers(&self) -> Option<Arc<Peers<B>>> {
        self.peers.lock().clone()
    }

    pub(crate) fn set_peers(&self, peers: Peers<B>) {
        self.lock().histories.declare(&peers.casts);
        *self.peers.lock() = Some(Arc::new(peers));
    }

    /// Amax `[1]` that sets the scale of a layer's cast, if its history has one.
    pub(crate) fn scaling_amax(&self, layer: &Layer, role: Role, scaling: DelayedScaling) -> Option<FloatTensor<B>> {
        let Step { number, histories, .. } = &mut *self.lock();
        histories.scaling_amax(layer.name(), role, scaling, *number)
    }

    /// Newest stamp when the last step began.
    pub(crate) fn begun_at(&self) -> u64 {
        self.begun_at.load(Relaxed)
    }

    /// Ends the step by a call, and begins the next.
    pub(crate) fn begin(&self) {
        let mut step = self.lock();
        step.histories.end();
        self.begin_locked(&mut step);
    }

    fn begin_locked(&self, step: &mut Step<B>) {
        let peers = self.peers();
        step.histories.complete(step.number, peers.as_deref());
        step.number = step.number.saturating_add(1);
        step.histories.update();
        step.samples.resolve(peers.as_deref());
        self.begun_at.store(now(), Relaxed);
        self.has_backward.store(false, Relaxed);
    }

    /// Resets the device to a saved step. `has_begun` tells whether the step of the saved
    /// parameters had begun.
    pub(crate) fn reset(&self, number: u64, has_begun: bool) {
        let mut step = self.lock();
        step.histories = Histories::default();
        if let Some(peers) = self.peers() {
            step.histories.declare(&peers.casts);
        }
        step.samples = Samples::default();
        step.number = number;
        self.begun_at.store(if has_begun { now() } else { 0 }, Relaxed);
        self.has_backward.store(!has_begun, Relaxed);
    }

    fn ends_before(&self, stamp: u64) -> bool {
        stamp > self.begun_at() && self.has_backward.load(Relaxed)
    }
}

/// Records that fprop reads a weight. The first weight built by an optimizer step begins a step.
pub(crate) fn on_weight_read<B: Float8Backend>(tag: &Tag, device: &Device<B>) {
    let applied = tag.layer.applied();
    let state = applied.state::<DeviceState<B>>(device.id());
    if state.ends_before(tag.stamp) && !applied.has_manual_steps() {
        let mut step = state.lock();
        // Another thread may have begun the step.
        if state.ends_before(tag.stamp) {
            state.begin_locked(&mut step);
        }
    }
}

/// Records that backward reached a linear.
pub(crate) fn on_backward<B: Float8Backend>(layer: &Layer, device: &Device<B>) {
    let state = DeviceState::<B>::of(layer, device);
    state.has_backward.store(true, Relaxed);
    let Step { number, histories, .. } = &mut *state.lock();
    histories.note_backward(layer.name(), *number);
}
