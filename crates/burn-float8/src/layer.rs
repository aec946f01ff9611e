//! A [`Layer`] is what a linear's weight carries through training: its name, its precision policy and its counters.
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, RwLock};

use burn_backend::DType;
use float8_kernels::Orientation;
use serde::Serialize;

use crate::backend::{Extent, GemmPath};
use crate::config::Float8LinearConfig;
use crate::copies::Tell;
use crate::group::Group;
use crate::health::{self, LayerHealth};

/// The three GEMMs of a linear, for x `[M, K]`, w `[K, N]` and dy `[M, N]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Gemm {
    /// y `[M, N]` = x · w
    Fprop,
    /// dx `[M, K]` = dy · wᵀ
    Dgrad,
    /// dw `[K, N]` = xᵀ · dy
    Wgrad,
}

impl Gemm {
    /// All three, in the order in which a step runs them.
    pub const ALL: [Self; 3] = [Self::Fprop, Self::Dgrad, Self::Wgrad];
}

impl core::fmt::Display for Gemm {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str(match self {
            Self::Fprop => "fprop",
            Self::Dgrad => "dgrad",
            Self::Wgrad => "wgrad",
        })
    }
}

/// The role of an operand, which decides its FP8 format.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Role {
    /// x
    Input,
    /// w
    Weight,
    /// dy
    GradOutput,
}

impl Role {
    /// All three roles.
    pub const ALL: [Self; 3] = [Self::Input, Self::Weight, Self::GradOutput];

    /// As in configurations: `input`, `weight`, `grad_output`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Input => "input",
            Self::Weight => "weight",
            Self::GradOutput => "grad_output",
        }
    }
}

/// Which contraction-major copy a GEMM reads of a tensor seen as `[rows, cols]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum Along {
    /// `[rows, cols]`: the contraction runs over the last axis.
    Rows,
    /// `[cols, rows]`: the contraction runs over all other axes.
    Cols,
}

impl Along {
    pub(crate) fn other(self) -> Self {
        match self {
            Self::Rows => Self::Cols,
            Self::Cols => Self::Rows,
        }
    }

    /// This copy alone.
    pub(crate) fn orientation(self) -> Orientation {
        match self {
            Self::Rows => Orientation::Rows,
            Self::Cols => Orientation::Cols,
        }
    }
}

/// In which precision a linear runs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Policy {
    /// In FP8, GEMM by GEMM as configured.
    Float8(Float8LinearConfig),
    /// All three GEMMs in high precision, and why.
    HighPrecision(Reason),
}

impl core::fmt::Display for Policy {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        match self {
            Self::Float8(config) => config.fmt(f),
            Self::HighPrecision(reason) => write!(f, "high precision: {reason}"),
        }
    }
}

/// Why a GEMM ran in high precision.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Reason {
    /// A name in `filter_fqns` matched.
    #[error("filter {0:?}")]
    Filter(String),
    /// `auto_filter_small_kn` matched.
    #[error("small: K={k} N={n}")]
    SmallKn {
        /// Features of x.
        k: usize,
        /// Features of y.
        n: usize,
    },
    /// One of the first or last layers.
    #[error("layer {number} of {layers}")]
    EdgeLayer {
        /// Its number, from 0.
        number: usize,
        /// How many there are.
        layers: usize,
    },
    /// The recipe keeps this GEMM in high precision.
    #[error("disabled by the recipe")]
    Recipe,
    /// The precision schedule has FP8 switched off.
    #[error("precision schedule")]
    Schedule,
    /// Statistics crossed a limit.
    #[error("fallback: {0}")]
    Fallback(String),
    /// The device's default configuration is off and the weight was never tagged.
    #[error("FP8 is off on this device")]
    Off,
    /// The operand's dtype has no FP8 cast on this device.
    #[error("dtype {0:?}")]
    Dtype(DType),
    /// An operand or the output is beyond what the backend's kernels index.
    #[error("{m}x{k}x{n} is beyond the kernels' index range")]
    TooLarge {
        /// Rows of x.
        m: usize,
        /// Features of x.
        k: usize,
        /// Features of y.
        n: usize,
    },
    /// M, K or N is zero.
    #[error("empty GEMM {m}x{k}x{n}")]
    Empty {
        /// Rows of x.
        m: usize,
        /// Features of x.
        k: usize,
        /// Features of y.
        n: usize,
    },
}

impl Reason {
    /// The setting of a configuration that it comes from.
    pub(crate) fn kind(&self) -> String {
        match self {
            Self::SmallKn { .. } => "auto_filter_small_kn".into(),
            Self::EdgeLayer { .. } => "first and last layers".into(),
            reason => reason.to_string(),
        }
    }

    /// Whether the user asked for it, by a filter, recipe, schedule, limit or default; or there is nothing to multiply.
    pub fn is_requested(&self) -> bool {
        !matches!(self, Self::Dtype(_) | Self::TooLarge { .. })
    }
}

/// Calls of one GEMM by the path they took.
#[derive(Debug, Default)]
struct GemmCalls {
    native: AtomicU64,
    emulated: AtomicU64,
    high_precision: AtomicU64,
    last: Mutex<LastCall>,
}

/// The last calls of one GEMM.
#[derive(Clone, Debug, Default)]
pub(crate) struct LastCall {
    /// How the last FP8 call was computed, and its operands.
    pub(crate) float8: Option<(GemmPath, [Extent; 2])>,
    /// Why the last high-precision call was one.
    pub(crate) reason: Option<Reason>,
    /// Why the last one was that nobody asked for.
    pub(crate) unrequested: Option<Reason>,
}

/// Name, precision policy and counters of one linear. Clones, `valid()` copies and replicas of a model share it.
pub struct Layer {
    name: String,
    policy: RwLock<Policy>,
    /// The policy without a fallback.
    configured: RwLock<Policy>,
    group: RwLock<Arc<Group>>,
    calls: [GemmCalls; 3],
    casts: [AtomicU64; 3],
    weight_matmuls: AtomicU64,
    live_copies: AtomicI64,
    live_bytes: AtomicI64,
    pub(crate) health: LayerHealth,
    /// The amaxes of x and w that the last fprop read, for their histories.
    untold: Mutex<[Option<Arc<dyn Tell>>; 2]>,
    /// For a bias gradient whose output gradient no dgrad or wgrad has seen with its own record of the bias.
    bias_dtype: Mutex<Option<DType>>,
}

impl core::fmt::Debug for Layer {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "Layer({:?}, {})", self.name, self.policy())
    }
}

impl Layer {
    pub(crate) fn new(name: impl Into<String>, policy: Policy, group: Arc<Group>) -> Self {
        Self {
            name: name.into(),
            configured: RwLock::new(policy.clone()),
            policy: RwLock::new(policy),
            group: RwLock::new(group),
            calls: Default::default(),
            casts: Default::default(),
            weight_matmuls: AtomicU64::new(0),
            live_copies: AtomicI64::new(0),
            live_bytes: AtomicI64::new(0),
            health: LayerHealth::default(),
            untold: Mutex::default(),
            bias_dtype: Mutex::new(None),
        }
    }

    /// The path of the linear in the module tree, such as `layers.0.mlp.up_proj`.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// In which precision the layer runs.
    pub fn policy(&self) -> Policy {
        self.policy.read().unwrap().clone()
    }

    /// What the configuration says, whatever statistics have made of it.
    pub(crate) fn configured(&self) -> Policy {
        self.configured.read().unwrap().clone()
    }

    /// Sets what the configuration says; a fallback is over.
    pub(crate) fn configure(&self, policy: Policy) {
        *self.configured.write().unwrap() = policy.clone();
        self.health.set_fallback(None);
        self.override_policy(policy);
    }

    /// Sets what runs.
    pub(crate) fn override_policy(&self, policy: Policy) {
        *self.policy.write().unwrap() = policy;
    }

    /// What the layers of one applied configuration share.
    pub(crate) fn group(&self) -> Arc<Group> {
        self.group.read().unwrap().clone()
    }

    pub(crate) fn set_group(&self, group: Arc<Group>) {
        *self.group.write().unwrap() = group;
    }

    /// How often an operand of this role was cast on behalf of this layer. A copy that the layer shares with the one
    /// that made it is not counted again.
    pub fn casts(&self, role: Role) -> u64 {
        self.casts[role as usize].load(Relaxed)
    }

    /// How often `Tensor::matmul` read the weight: not a linear, so not in FP8.
    pub fn weight_matmuls(&self) -> u64 {
        self.weight_matmuls.load(Relaxed)
    }

    /// FP8 copies made on behalf of this layer that are alive now.
    pub fn live_copies(&self) -> u64 {
        self.live_copies.load(Relaxed).max(0) as u64
    }

    /// Bytes of the codes and scales of [`live_copies`](Self::live_copies).
    pub fn live_bytes(&self) -> u64 {
        self.live_bytes.load(Relaxed).max(0) as u64
    }

    /// Keeps an amax that fprop has read until backward shows that it was no evaluation.
    pub(crate) fn tell_in_backward(&self, role: Role, amax: Arc<dyn Tell>) {
        self.untold.lock().unwrap()[role as usize] = Some(amax);
    }

    /// Forgets what an fprop has left that no backward has followed.
    pub(crate) fn forget_fprop(&self) {
        *self.untold.lock().unwrap() = Default::default();
        health::forget(self);
    }

    /// Backward has come to this layer.
    pub(crate) fn tell_histories(&self) {
        let untold = core::mem::take(&mut *self.untold.lock().unwrap());
        untold.into_iter().flatten().for_each(|amax| amax.tell());
    }

    pub(crate) fn count_cast(&self, role: Role) {
        self.casts[role as usize].fetch_add(1, Relaxed);
    }

    pub(crate) fn count_weight_matmul(&self) {
        self.weight_matmuls.fetch_add(1, Relaxed);
    }

    pub(crate) fn count_copy(&self, change: i64, bytes: i64) {
        self.live_copies.fetch_add(change, Relaxed);
        self.live_bytes.fetch_add(change * bytes, Relaxed);
    }

    pub(crate) fn count_fp8(&self, gemm: Gemm, path: GemmPath, operands: [Extent; 2]) {
        let calls = &self.calls[gemm as usize];
        let counter = if path.is_native() { &calls.native } else { &calls.emulated };
        counter.fetch_add(1, Relaxed);
        calls.last.lock().unwrap().float8 = Some((path, operands));
    }

    pub(crate) fn count_high_precision(&self, gemm: Gemm, reason: Reason) {
        let calls = &self.calls[gemm as usize];
        calls.high_precision.fetch_add(1, Relaxed);
        let mut last = calls.last.lock().unwrap();
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
            *calls.last.lock().unwrap() = LastCall::default();
        }
    }

    pub(crate) fn last(&self, gemm: Gemm) -> LastCall {
        self.calls[gemm as usize].last.lock().unwrap().clone()
    }

    pub(crate) fn set_bias_dtype(&self, dtype: DType) {
        *self.bias_dtype.lock().unwrap() = Some(dtype);
    }

    pub(crate) fn bias_dtype(&self) -> Option<DType> {
        *self.bias_dtype.lock().unwrap()
    }
}
