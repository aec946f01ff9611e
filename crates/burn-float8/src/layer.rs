//! A [`Layer`] is what a linear's weight carries through training: its name, its precision policy and its counters.
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering::Relaxed};
use std::sync::{Mutex, RwLock};

use burn_backend::DType;
use serde::Serialize;

use crate::backend::GemmPath;
use crate::config::Recipe;

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

/// The role of an operand, which decides its FP8 format.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
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
}

/// In which precision a linear runs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Policy {
    /// All three GEMMs in FP8, by this recipe.
    Float8(Recipe),
    /// All three GEMMs in high precision, and why.
    HighPrecision(Reason),
}

/// Why a GEMM ran in high precision.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Reason {
    /// A name in `filter_fqns` matched.
    #[error("filter {0:?}")]
    Filter(String),
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

/// Calls of one GEMM by the path they took.
#[derive(Debug, Default)]
struct GemmCalls {
    native: AtomicU64,
    emulated: AtomicU64,
    high_precision: AtomicU64,
    /// The last path and the last reason for high precision.
    last: Mutex<(Option<GemmPath>, Option<Reason>)>,
}

/// Name, precision policy and counters of one linear. Clones, `valid()` copies and replicas of a model share it.
#[derive(Debug)]
pub struct Layer {
    name: String,
    policy: RwLock<Policy>,
    calls: [GemmCalls; 3],
    casts: [AtomicU64; 3],
    live_copies: AtomicI64,
    /// For a bias gradient whose output gradient no dgrad or wgrad has seen with its own record of the bias.
    bias_dtype: Mutex<Option<DType>>,
}

impl Layer {
    pub(crate) fn new(name: impl Into<String>, policy: Policy) -> Self {
        Self {
            name: name.into(),
            policy: RwLock::new(policy),
            calls: Default::default(),
            casts: Default::default(),
            live_copies: AtomicI64::new(0),
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

    pub(crate) fn set_policy(&self, policy: Policy) {
        *self.policy.write().unwrap() = policy;
    }

    /// How often an operand of this role was cast on behalf of this layer. A copy that the layer shares with the one
    /// that made it is not counted again.
    pub fn casts(&self, role: Role) -> u64 {
        self.casts[role as usize].load(Relaxed)
    }

    /// FP8 copies made on behalf of this layer that are alive now.
    pub fn live_copies(&self) -> u64 {
        self.live_copies.load(Relaxed).max(0) as u64
    }

    pub(crate) fn count_cast(&self, role: Role) {
        self.casts[role as usize].fetch_add(1, Relaxed);
    }

    pub(crate) fn count_copy(&self, change: i64) {
        self.live_copies.fetch_add(change, Relaxed);
    }

    pub(crate) fn count_fp8(&self, gemm: Gemm, path: GemmPath) {
        let calls = &self.calls[gemm as usize];
        let counter = if path.is_native() { &calls.native } else { &calls.emulated };
        counter.fetch_add(1, Relaxed);
        calls.last.lock().unwrap().0 = Some(path);
    }

    pub(crate) fn count_high_precision(&self, gemm: Gemm, reason: Reason) {
        let calls = &self.calls[gemm as usize];
        calls.high_precision.fetch_add(1, Relaxed);
        calls.last.lock().unwrap().1 = Some(reason);
    }

    /// `(native, emulated, high precision)` calls.
    pub(crate) fn calls(&self, gemm: Gemm) -> [u64; 3] {
        let calls = &self.calls[gemm as usize];
        [&calls.native, &calls.emulated, &calls.high_precision].map(|c| c.load(Relaxed))
    }

    pub(crate) fn last(&self, gemm: Gemm) -> (Option<GemmPath>, Option<Reason>) {
        self.calls[gemm as usize].last.lock().unwrap().clone()
    }

    pub(crate) fn set_bias_dtype(&self, dtype: DType) {
        *self.bias_dtype.lock().unwrap() = Some(dtype);
    }

    pub(crate) fn bias_dtype(&self) -> Option<DType> {
        *self.bias_dtype.lock().unwrap()
    }
}
