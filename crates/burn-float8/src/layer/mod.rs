//! [`Layer`]: what a linear's weight carries through training: its name, its precision policy and its counters.
mod autocast;
mod conversion;
mod health;
mod plan;
mod tag;
mod untagged;

use std::any::{Any, TypeId};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64, Ordering::Relaxed};

use burn_backend::tensor::Device;
use burn_backend::{DeviceId, DeviceOps};
use float8_kernels::{Cast, GemmPath};
use parking_lot::{Mutex, RwLock};

use crate::backend::{Float8Backend, OperandSize};
use crate::config::{FallbackTo, Policy};
use crate::terms::{Gemm, Operand, Reason, Recipe, Role};
pub use autocast::float8_autocast;
pub(crate) use autocast::is_autocast_enabled;
pub(crate) use conversion::{Conversion, Number as ConversionNumber};
pub(crate) use health::non_finite;
pub use health::{CastHealth, Fallback, OperandHealth};
pub(crate) use plan::{CastPlan, LinearDtypes, LinearPlan};
pub(crate) use tag::{Mark, Tag, now};
pub use untagged::UNTAGGED_NAME;
pub(crate) use untagged::UntaggedRule;
pub(crate) use untagged::{set_default, settle_at_apply, settle_at_linear, untagged, untagged_rule, was_applied};

/// Reads the amax of a cast's tensor, if it was looked at, and the amax that the scale was made of.
pub(crate) trait ReadAmax: Send + Sync {
    fn read(&self) -> (Option<f32>, f32);
}

/// An operand of the last FP8 call of a GEMM.
#[derive(Clone)]
pub(crate) struct LastOperand {
    pub(crate) size: OperandSize,
    pub(crate) cast: Cast,
    pub(crate) amaxes: Arc<dyn ReadAmax>,
}

/// The last calls of one GEMM.
#[derive(Clone, Default)]
pub(crate) struct LastCall {
    /// How the last FP8 call was computed, and its operands.
    pub(crate) float8: Option<(GemmPath, [LastOperand; 2])>,
    /// Why the last high-precision call was one.
    pub(crate) reason: Option<Reason>,
    /// Why the last one was that nobody asked for.
    pub(crate) unrequested: Option<Reason>,
}

/// Calls of one GEMM by the path they took.
#[derive(Default)]
struct GemmCalls {
    native: AtomicU64,
    emulated: AtomicU64,
    high_precision: AtomicU64,
    last: Mutex<LastCall>,
}

/// A backend, a device and dtypes.
type PlanKey = (TypeId, DeviceId, LinearDtypes);

/// What the configuration says, and what statistics have made of it.
struct Settings {
    configured: Arc<Policy>,
    active: Arc<Policy>,
    /// The plan of `active`, where that is FP8.
    plan: Option<Arc<LinearPlan>>,
    /// The same, resolved for each backend, device and dtypes.
    resolved: Vec<(PlanKey, Arc<LinearPlan>)>,
    fallback: Option<Fallback>,
}

impl Settings {
    fn new(configured: Arc<Policy>) -> Self {
        let plan = plan(&configured);
        Self { active: configured.clone(), configured, plan, resolved: vec![], fallback: None }
    }
}

fn plan(policy: &Policy) -> Option<Arc<LinearPlan>> {
    match policy {
        Policy::Float8(config) => Some(Arc::new(LinearPlan::new(config))),
        Policy::HighPrecision(_) => None,
    }
}

/// Name, precision policy and counters of one linear. Clones, `valid()` copies and replicas of a model share it.
pub struct Layer {
    name: String,
    conversion: Arc<Conversion>,
    /// Where the weight comes from if this process has some of its rows: an `Arc<dyn WeightSource<B>>`.
    source: Option<Box<dyn Any + Send + Sync>>,
    settings: RwLock<Settings>,
    /// What [`set_float8_enabled`](crate::set_float8_enabled) says.
    enabled: AtomicBool,
    calls: [GemmCalls; 3],
    casts: [AtomicU64; 3],
    weight_matmuls: AtomicU64,
    /// How often operations have decoded a weight that is codes alone.
    decodes: Mutex<BTreeMap<&'static str, u64>>,
    live_copies: AtomicI64,
    live_bytes: AtomicI64,
    sampled: Mutex<[Option<OperandHealth>; 6]>,
    /// The stamp of the newest tensor that was built for this layer's weight.
    built_at: AtomicU64,
}

impl core::fmt::Debug for Layer {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "Layer({:?}, {})", self.name, self.policy())
    }
}

impl Layer {
    pub(crate) fn new(name: impl Into<String>, policy: Policy, conversion: Arc<Conversion>) -> Self {
        let settings = Settings::new(Arc::new(policy));
        Self {
            name: name.into(),
            conversion,
            source: None,
            settings: RwLock::new(settings),
            enabled: AtomicBool::new(true),
            calls: Default::default(),
            casts: Default::default(),
            weight_matmuls: AtomicU64::new(0),
            decodes: Mutex::default(),
            live_copies: AtomicI64::new(0),
            live_bytes: AtomicI64::new(0),
            sampled: Mutex::default(),
            built_at: AtomicU64::new(0),
        }
    }

    /// This layer with a weight that comes from this `Arc<dyn WeightSource<B>>`.
    pub(crate) fn with_source(self, source: impl Any + Send + Sync) -> Self {
        Self { source: Some(Box::new(source)), ..self }
    }

    /// Where the weight comes from if this process has some of its rows.
    pub(crate) fn source(&self) -> Option<&(dyn Any + Send + Sync)> {
        self.source.as_deref()
    }

    /// Whether this process may have some rows of the weight alone.
    pub(crate) fn has_source(&self) -> bool {
        self.source.is_some()
    }

    /// The path of the linear in the module tree, such as `layers.0.mlp.up_proj`.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// In which precision the layer runs.
    pub fn policy(&self) -> Policy {
        Policy::clone(&self.active())
    }

    /// [`policy`](Self::policy), shared.
    pub(crate) fn active(&self) -> Arc<Policy> {
        self.settings.read().active.clone()
    }

    /// How a use of the layer runs in FP8, or why it does not: `off`, if nothing else, keeps this use in high precision.
    pub(crate) fn plan(&self, off: Option<Reason>) -> Result<Arc<LinearPlan>, Reason> {
        let settings = self.settings.read();
        match (&settings.plan, settings.active.as_ref()) {
            (None, Policy::HighPrecision(reason)) => Err(reason.clone()),
            (None, Policy::Float8(_)) => unreachable!("resolved when it was set"),
            (Some(plan), _) => match off {
                Some(reason) => Err(reason),
                None if !self.is_enabled() => Err(Reason::Schedule),
                None => Ok(plan.clone()),
            },
        }
    }

    /// [`plan`](Self::plan) for these dtypes on a device, resolved by the first use.
    ///
    /// # Panics
    ///
    /// If the device cannot run FP8.
    pub(crate) fn plan_on<B: Float8Backend>(
        &self,
        device: &Device<B>,
        dtypes: LinearDtypes,
        off: Option<Reason>,
    ) -> Result<Arc<LinearPlan>, Reason> {
        let plan = self.plan(off)?;
        let key = (TypeId::of::<B>(), device.id(), dtypes);
        if let Some((_, resolved)) = self.settings.read().resolved.iter().find(|(known, _)| *known == key) {
            return Ok(resolved.clone());
        }
        // The first use on this device of a program that has applied no configuration.
        B::fp8_prepare(device, None).unwrap_or_else(|error| panic!("{}", error));
        let resolved = Arc::new(plan.on(B::fp8_facts(device), dtypes));
        let mut settings = self.settings.write();
        // Another policy may have been set meanwhile.
        if settings.plan.as_ref().is_some_and(|current| Arc::ptr_eq(current, &plan)) {
            settings.resolved.push((key, resolved.clone()));
        }
        Ok(resolved)
    }

    /// Whether `Tensor::matmul` with its weight on the right runs in FP8.
    pub(crate) fn has_matmul(&self) -> bool {
        self.settings.read().plan.as_ref().is_some_and(|plan| plan.matmul)
    }

    /// What the configuration says, whatever statistics have made of it.
    pub(crate) fn configured(&self) -> Arc<Policy> {
        self.settings.read().configured.clone()
    }

    /// Sets what the configuration says; a fallback is over.
    pub(crate) fn configure(&self, policy: Policy) {
        *self.settings.write() = Settings::new(Arc::new(policy));
    }

    /// Moves the layer out of its recipe.
    pub(crate) fn fall_back(&self, fallback: Fallback) {
        let mut settings = self.settings.write();
        settings.active = Arc::new(match (fallback.to, settings.configured.as_ref()) {
            (FallbackTo::Rowwise, Policy::Float8(config)) => {
                Policy::Float8(config.clone().with_recipe(Recipe::Rowwise))
            }
            _ => Policy::HighPrecision(Reason::Fallback(fallback.reason.clone())),
        });
        settings.plan = plan(&settings.active);
        settings.resolved.clear();
        settings.fallback = Some(fallback);
    }

    /// Where statistics have moved the layer.
    pub(crate) fn fallback(&self) -> Option<Fallback> {
        self.settings.read().fallback.clone()
    }

    /// What the layers of one applied configuration share.
    pub(crate) fn conversion(&self) -> &Arc<Conversion> {
        &self.conversion
    }

    pub(crate) fn is_enabled(&self) -> bool {
        self.enabled.load(Relaxed)
    }

    pub(crate) fn set_enabled(&self, enabled: bool) {
        self.enabled.store(enabled, Relaxed);
    }

    /// How often an operand of this role was cast on behalf of this layer. A copy that the layer shares with the one
    /// that made it is not counted again.
    pub fn casts(&self, role: Role) -> u64 {
        self.casts[role as usize].load(Relaxed)
    }

    /// How often `Tensor::matmul` read the weight in high precision.
    pub fn weight_matmuls(&self) -> u64 {
        self.weight_matmuls.load(Relaxed)
    }

    /// How often each operation has decoded the weight, where that is [FP8 codes alone](crate::weights).
    pub fn decodes(&self) -> BTreeMap<&'static str, u64> {
        self.decodes.lock().clone()
    }

    /// FP8 copies made on behalf of this layer that are alive now.
    pub fn live_copies(&self) -> u64 {
        self.live_copies.load(Relaxed).max(0) as u64
    }

    /// Bytes of the codes and scales of [`live_copies`](Self::live_copies).
    pub fn live_bytes(&self) -> u64 {
        self.live_bytes.load(Relaxed).max(0) as u64
    }

    pub(crate) fn count_cast(&self, role: Role) {
        self.casts[role as usize].fetch_add(1, Relaxed);
    }

    pub(crate) fn count_weight_matmul(&self) {
        self.weight_matmuls.fetch_add(1, Relaxed);
    }

    pub(crate) fn count_decode(&self, operation: &'static str) {
        *self.decodes.lock().entry(operation).or_default() += 1;
    }

    pub(crate) fn count_copy(&self, change: i64, bytes: i64) {
        self.live_copies.fetch_add(change, Relaxed);
        self.live_bytes.fetch_add(change * bytes, Relaxed);
    }

    pub(crate) fn count_fp8(&self, gemm: Gemm, path: GemmPath, operands: [LastOperand; 2]) {
        let calls = &self.calls[gemm as usize];
        let counter = if path.is_native() { &calls.native } else { &calls.emulated };
        counter.fetch_add(1, Relaxed);
        // The tensors of the call before are dropped after the lock is released.
        let _before = calls.last.lock().float8.replace((path, operands));
    }

    pub(crate) fn count_high_precision(&self, gemm: Gemm, reason: Reason) {
        let calls = &self.calls[gemm as usize];
        calls.high_precision.fetch_add(1, Relaxed);
        let mut last = calls.last.lock();
        if !reason.is_requested() {
            last.unrequested = Some(reason.clone());
        }
        last.reason = Some(reason);
    }

    /// `[native, emulated, high precision]` calls.
    pub(crate) fn calls(&self, gemm: Gemm) -> [u64; 3] {
        let calls = &self.calls[gemm as usize];
        [&calls.native, &calls.emulated, &calls.high_precision].map(|c| c.load(Relaxed))
    }

    /// Forgets the calls so far.
    pub(crate) fn reset_calls(&self) {
        for calls in &self.calls {
            for counter in [&calls.native, &calls.emulated, &calls.high_precision] {
                counter.store(0, Relaxed);
            }
            *calls.last.lock() = LastCall::default();
        }
    }

    pub(crate) fn last(&self, gemm: Gemm) -> LastCall {
        self.calls[gemm as usize].last.lock().clone()
    }

    pub(crate) fn set_sampled(&self, operand: Operand, health: OperandHealth) {
        self.sampled.lock()[operand.index()] = Some(health);
    }

    /// The statistics of an operand; those of its other copy where both are one cast, which is sampled once.
    pub(crate) fn sampled(&self, operand: Operand) -> Option<OperandHealth> {
        let sampled = self.sampled.lock();
        let is_alike = || self.settings.read().plan.as_ref().is_some_and(|plan| plan.has_one_set_of_codes(operand));
        let other = || sampled[operand.other().index()].clone().filter(|_| is_alike());
        sampled[operand.index()].clone().or_else(other)
    }

    /// Notes that a tensor with this stamp was built for the weight.
    pub(crate) fn set_built(&self, stamp: u64) {
        self.built_at.fetch_max(stamp, Relaxed);
    }

    pub(crate) fn built_at(&self) -> u64 {
        self.built_at.load(Relaxed)
    }
}
