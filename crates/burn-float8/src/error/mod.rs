//! [`Float8Error`]: all errors of the crate, each with the wrong values.
mod device;

use std::borrow::Cow;

pub use device::SelfCheckFailure;

use crate::terms::Gemm;

/// Error of a configuration, of applying it, of the state of a run, or of a device.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Float8Error {
    /// A setting is out of range, contradicts another one, or does not fit the model.
    #[error("{key}{}{value}: {reason}", if value.is_empty() { "" } else { " = " })]
    Config {
        /// Key in a configuration file, or name of an environment variable.
        key: &'static str,
        /// Its value, strings in quotes. Empty if the key is missing.
        value: String,
        /// The fault, and the expected values.
        reason: Cow<'static, str>,
    },
    /// No linear of the model runs in FP8.
    #[error("{}", if *linears == 0 {
        "the model has no linear layer (no float parameter `weight` of rank 2 inside a `Linear`), so no FP8 can run in it".into()
    } else { format!(
        "all {linears} linears are kept in high precision ({reasons}): nothing is left to run in FP8"
    ) })]
    NothingConverted {
        /// Number of linears of the model.
        linears: usize,
        /// Settings that keep them in high precision.
        reasons: String,
    },
    /// Ranks divide the model, and their parts depend on the casts of its configuration.
    #[error(
        "ranks divide the model: apply configurations and create adapters before TensorParallel::apply and Sharded::apply"
    )]
    Sharded,
    /// No configuration was applied to the model.
    #[error("no configuration was applied to the model, so it has no FP8 state: call `Float8Config::apply` first")]
    NotApplied,
    /// A GEMM ran or would have run in high precision, unrequested.
    #[error("{layer}: {gemm} in high precision, unrequested: {reason}")]
    UnrequestedHighPrecision {
        /// Name of the layer.
        layer: String,
        /// The GEMM.
        gemm: Gemm,
        /// The reason.
        reason: String,
    },
    /// Linears of the model are untagged: they lost their layers, or never had one.
    #[error(
        "{linears} linears of the model carry no layer, so that no configuration applies to them: {names}. A record that is loaded into a \
         model without FP8 layers, such as a valid() one, a quantized copy, and weights rebuilt from data have none: apply the configuration to what it is to run with"
    )]
    UntaggedLinears {
        /// Number of linears.
        linears: usize,
        /// Their names, shortened if there are many.
        names: String,
    },
    /// A layer was never called as a linear.
    #[error(
        "{layer}: converted to FP8, but never called as a linear{}",
        if *weight_matmuls == 0 { String::new() } else { format!(
            "; Tensor::matmul read its weight {weight_matmuls} times: set matmul = true to run these in FP8, or filter it"
        ) }
    )]
    NeverCalled {
        /// Name of the layer.
        layer: String,
        /// Number of reads of its weight by `Tensor::matmul`.
        weight_matmuls: u64,
    },
    /// FP8 codes do not fit the weight of a linear of the model.
    #[error("{layer}: FP8 codes {what}")]
    Codes {
        /// Name of the layer.
        layer: String,
        /// The fault, with the values.
        what: String,
    },
    /// A weight without high-precision values would be trained.
    #[error(
        "{layer}: its weight is FP8-only, which no optimizer updates: freeze it (`no_grad`) and train an adapter, or keep the \
         high-precision values"
    )]
    Fp8OnlyTrained {
        /// Name of the layer.
        layer: String,
    },
    /// A saved state does not belong to the model.
    #[error("the state of {layer}: {what}")]
    State {
        /// Name of the layer in the state.
        layer: String,
        /// The difference, with the values.
        what: String,
    },
    /// The driver, compiler or headers of the device are missing, or do not match each other.
    #[error(transparent)]
    Setup(#[from] device_select::DeviceError),
    /// A small cast or GEMM is wrong on every path of the device.
    #[error("the device does not compute: a {what} of 64 by 64 failed on every path: {reason}")]
    Preflight {
        /// `cast` or `GEMM`.
        what: &'static str,
        /// The last failure.
        reason: String,
    },
    /// A task of the device's thread panicked, or a launch failed. Later results read uninitialized
    /// memory.
    #[error("results on the device are lost: {message}")]
    Lost {
        /// Message of the device.
        message: String,
    },
    /// A kernel is wrong on the device.
    #[error("{0}")]
    SelfCheck(SelfCheckFailure),
}

impl Float8Error {
    pub(crate) fn config(key: &'static str, value: impl ToString, reason: impl Into<Cow<'static, str>>) -> Self {
        Self::Config { key, value: value.to_string(), reason: reason.into() }
    }
}

/// Panics for `Autodiff<Float8<B>>`, in the backward of a linear or a call of a function of `nn`.
pub(crate) fn wrong_order() -> ! {
    panic!(
        "Float8 wraps the backend that you train with: write `Float8<Autodiff<B>>` in place of `Autodiff<Float8<B>>`"
    )
}

/// An error of `apply`, with the unchanged model.
pub struct ApplyError<M, E = Float8Error> {
    /// The error.
    pub error: E,
    /// The model.
    pub model: Box<M>,
}

impl<M, E: core::fmt::Debug> core::fmt::Debug for ApplyError<M, E> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("ApplyError").field("error", &self.error).finish_non_exhaustive()
    }
}

impl<M, E: core::fmt::Display> core::fmt::Display for ApplyError<M, E> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        self.error.fmt(f)
    }
}

impl<M, E: core::fmt::Debug + core::fmt::Display> core::error::Error for ApplyError<M, E> {}

impl<M> From<ApplyError<M>> for Float8Error {
    fn from(error: ApplyError<M>) -> Self {
        error.error
    }
}
