//! [`Layer`]: name, precision policy and counters of a linear, carried by its weight through
//! training.
mod applied;
mod autocast;
mod calls;
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
use float8_kernels::{GemmPath, disabled_count};
use parking_lot::{Mutex, RwLock};

use crate::backend::Float8Backend;
use crate::config::{FallbackTo, Policy};
use crate::terms::{Gemm, Operand, Reason, Recipe, Role};
pub(crate) use applied::{Applied, AppliedNumber};
pub use autocast::float8_autocast;
pub(crate) use autocast::is_autocast_enabled;
pub use calls::GemmTotals;
pub(crate) use calls::{GemmCalls, LastOperand, ReadAmax};
pub(crate) use health::non_finite;
pub use health::{CastHealth, Fallback, OperandHealth};
pub(crate) use plan::{CastPlan, LinearDtypes, LinearPlan};
pub(crate) use tag::{Mark, Tag, now};
pub use untagged::UNTAGGED_NAME;
pub(crate) use untagged::UntaggedRule;
pub(crate) use untagged::{set_default, settle_at_apply, settle_at_linear, untagged, untagged_rule, was_applied};

/// A backend type, a device, dtypes, and the number of kernels that were disabled by then.
type PlanKey = (TypeId, DeviceId, LinearDtypes, usize);

/// Configured policy, and the active policy after a fallback.
struct Settings {
    configured: Arc<Policy>,
    active: Arc<Policy>,
    /// Plan of `active`, if that is FP8.
    plan: Option<Arc<LinearPlan>>,
    /// The plan resolved for each backend, device and dtypes.
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

/// Name, precision policy and counters of one linear. Clones, `valid()` copies and replicas of a
/// model share it.
pub struct Layer {
    name: String,
    applied: Arc<Applied>,
    /// Source of the weight if it is sharded: an `Arc<dyn ShardHooks<B>>`.
    source: Option<Box<dyn Any + Send + Sync>>,
    /// Part of the linear on this rank, if ranks divide it: an `Arc<dyn ParallelHooks<B>>`.
    parallel: Option<Box<dyn Any + Send + Sync>>,
    /// Experts on this rank, if ranks divide them: an `Arc<dyn ExpertHooks<B>>`.
    experts: Option<Box<dyn Any + Send + Sync>>,
    settings: RwLock<Settings>,
    /// Setting of [`set_float8_enabled`](crate::set_float8_enabled).
    enabled: AtomicBool,
    calls: [Mutex<GemmCalls>; 3],
    casts: [AtomicU64; 3],
    weight_matmuls: AtomicU64,
    /// Number of decodes of an FP8-only weight by operation.
    decodes: Mutex<BTreeMap<&'static str, u64>>,
    live_copies: AtomicI64,
    live_bytes: AtomicI64,
    sampled: Mutex<[Option<OperandHealth>; 6]>,
    /// Stamp of the newest tensor built for this layer's weight.
    built_at: AtomicU64,
}

impl core::fmt::Debug for Layer {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "Layer({:?}, {})", self.name, self.policy())
    }
}

impl Layer {
    pub(crate) fn new(name: impl Into<String>, policy: Policy, applied: Arc<Applied>) -> Self {
        let settings = Settings::new(Arc::new(policy));
        Self {
            name: name.into(),
            applied,
            source: None,
            parallel: None,
            experts: None,
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

    /// Sets the source of the weight, an `Arc<dyn ShardHooks<B>>`.
    pub(crate) fn with_source(self, source: impl Any + Send + Sync) -> Self {
        Self { source: Some(Box::new(source)), ..self }
    }

    /// Sets the part of the linear on this rank, an `Arc<dyn ParallelHooks<B>>`.
    pub(crate) fn with_parallel(self, parallel: impl Any + Send + Sync) -> Self {
        Self { parallel: Some(Box::new(parallel)), ..self }
    }

    /// Part of the linear on this rank, if ranks divide it.
    pub(crate) fn parallel(&self) -> Option<&(dyn Any + Send + Sync)> {
        self.parallel.as_deref()
    }

    /// Sets the experts on this rank, an `Arc<dyn ExpertHooks<B>>`.
    pub(crate) fn with_experts(self, experts: impl Any + Send + Sync) -> Self {
        Self { experts: Some(Box::new(experts)), ..self }
    }

    /// Experts on this rank, if ranks divide them.
    pub(crate) fn experts(&self) -> Option<&(dyn Any + Send + Sync)> {
        self.experts.as_deref()
    }

    /// Whether other ranks hold parts of x and dy.
    pub(crate) fn divides_tokens(&self) -> bool {
        self.parallel.is_some() || self.experts.is_some()
    }

    /// Whether other ranks hold parts of the weight.
    pub(crate) fn is_divided(&self) -> bool {
        self.source.is_some() || self.divides_tokens()
    }

    /// Source of the weight, if it is sharded.
    pub(crate) fn source(&self) -> Option<&(dyn Any + Send + Sync)> {
        self.source.as_deref()
    }

    /// Path of the linear in the module tree, such as `layers.0.mlp.up_proj`.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Current precision of the layer.
    pub fn policy(&self) -> Policy {
        Policy::clone(&self.active())
    }

    /// [`policy`](Self::policy) without a copy.
    pub(crate) fn active(&self) -> Arc<Policy> {
        self.settings.read().active.clone()
    }

    /// Plan of one use of the layer, or the reason for high precision. `off` keeps this use in high
    /// precision unless the policy already does.
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

    /// [`plan`](Self::plan) resolved for dtypes on a device. The first use resolves it.
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
        let key = (TypeId::of::<B>(), device.id(), dtypes, disabled_count());
        if let Some((_, resolved)) = self.settings.read().resolved.iter().find(|(known, _)| *known == key) {
            return Ok(resolved.clone());
        }
        // First use on this device if the program has applied no configuration.
        B::fp8_prepare(device, None).unwrap_or_else(|error| panic!("{}", error));
        let resolved = Arc::new(plan.on(B::fp8_facts(device), dtypes, self.is_divided()));
        let mut settings = self.settings.write();
        // Another thread may have set another policy in the meantime.
        if settings.plan.as_ref().is_some_and(|current| Arc::ptr_eq(current, &plan)) {
            settings.resolved.push((key, resolved.clone()));
        }
        Ok(resolved)
    }

    /// Whether `Tensor::matmul` with its weight on the right runs in FP8.
    pub(crate) fn has_matmul(&self) -> bool {
        self.settings.read().plan.as_ref().is_some_and(|plan| plan.matmul)
    }

    /// Configured policy, before any fallback.
    pub(crate) fn configured(&self) -> Arc<Policy> {
        self.settings.read().configured.clone()
    }

    /// Sets the configured policy and clears a fallback.
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

    /// Fallback of the layer, if statistics moved it.
    pub(crate) fn fallback(&self) -> Option<Fallback> {
        self.settings.read().fallback.clone()
    }

    /// Data shared by the layers of one applied configuration.
    pub(crate) fn applied(&self) -> &Arc<Applied> {
        &self.applied
    }

    pub(crate) fn is_enabled(&self) -> bool {
        self.enabled.load(Relaxed)
    }

    pub(crate) fn set_enabled(&self, enabled: bool) {
        self.enabled.store(enabled, Relaxed);
    }

    /// Number of casts of operands of this role by this layer. If layers share a copy, it counts
    /// for the layer that made it.
    pub fn casts(&self, role: Role) -> u64 {
        self.casts[role as usize].load(Relaxed)
    }

    /// Number of reads of the weight by `Tensor::matmul` in high precision.
    pub fn weight_matmuls(&self) -> u64 {
        self.weight_matmuls.load(Relaxed)
    }

    /// Number of decodes of an [FP8-only weight](crate::weights) by operation.
    pub fn decodes(&self) -> BTreeMap<&'static str, u64> {
        self.decodes.lock().clone()
    }

    /// Number of live FP8 copies made for this layer.
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
        let mut calls = self.calls[gemm as usize].lock();
        match calls.float8.iter_mut().find(|(known, _)| *known == path) {
            Some((_, count)) => *count += 1,
            None => calls.float8.push((path, 1)),
        }
        let before = calls.last.replace((path, operands));
        // The previous call's tensors are dropped after the lock is released.
        drop(calls);
        drop(before);
    }

    pub(crate) fn count_high_precision(&self, gemm: Gemm, reason: Reason) {
        let mut calls = self.calls[gemm as usize].lock();
        calls.high_precision += 1;
        if !reason.is_requested() {
            calls.unrequested = Some(reason.clone());
        }
        calls.reason = Some(reason);
    }

    /// Records the kernel of a high-precision call, if it had one.
    pub(crate) fn set_high_precision_kernel(&self, gemm: Gemm, kernel: Option<&'static str>) {
        if kernel.is_some() {
            self.calls[gemm as usize].lock().high_precision_kernel = kernel;
        }
    }

    pub(crate) fn calls(&self, gemm: Gemm) -> GemmCalls {
        self.calls[gemm as usize].lock().clone()
    }

    /// Resets the counters of calls.
    pub(crate) fn reset_calls(&self) {
        self.calls.iter().for_each(|calls| *calls.lock() = GemmCalls::default());
    }

    pub(crate) fn set_sampled(&self, operand: Operand, health: OperandHealth) {
        self.sampled.lock()[operand.index()] = Some(health);
    }

    /// Statistics of an operand. Falls back to its other copy if both have the same codes, which
    /// are sampled once.
    pub(crate) fn sampled(&self, operand: Operand) -> Option<OperandHealth> {
        let sampled = self.sampled.lock();
        let is_alike = || self.settings.read().plan.as_ref().is_some_and(|plan| plan.has_one_set_of_codes(operand));
        let other = || sampled[operand.other().index()].clone().filter(|_| is_alike());
        sampled[operand.index()].clone().or_else(other)
    }

    /// Records the stamp of a tensor built for the weight.
    pub(crate) fn set_built(&self, stamp: u64) {
        self.built_at.fetch_max(stamp, Relaxed);
    }

    pub(crate) fn built_at(&self) -> u64 {
        self.built_at.load(Relaxed)
    }
}
