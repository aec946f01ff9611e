//! [`Float8Error`]: what can go wrong, each case with the values that were wrong.
mod device;

use std::borrow::Cow;

pub use device::SelfCheckFailure;

use crate::terms::Gemm;

/// Error of a configuration, of its application, of the state of a run, or of a device.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Float8Error {
    /// A setting is out of range, contradicts another one, or does not fit the model.
    #[error("{key}{}{value}: {reason}", if value.is_empty() { "" } else { " = " })]
    Config {
        /// The key in a configuration file, or the variable of the environment.
        key: &'static str,
        /// Its value, a string in quotes; empty if the key is missing.
        value: String,
        /// The fault, and the values that are expected.
        reason: Cow<'static, str>,
    },
    /// No linear of the model runs in FP8.
    #[error("{}", if *linears == 0 {
        "the model has no linear layer (no float parameter `weight` of rank 2 inside a `Linear`), so no FP8 can run in it".into()
    } else { format!(
        "all {linears} linears are kept in high precision ({reasons}): nothing is left to run in FP8"
    ) })]
    NothingConverted {
        /// How many linears the model has.
        linears: usize,
        /// The settings that keep them in high precision.
        reasons: String,
    },
    /// Its shards follow from the casts that it was configured with.
    #[error("the model is sharded: another configuration is to be applied before Sharded::apply")]
    Sharded,
    /// No configuration was applied to the model.
    #[error("no configuration was applied to the model, so it has no FP8 state: call `Float8Config::apply` first")]
    NotApplied,
    /// A GEMM ran, or would have run, in high precision that nobody asked for.
    #[error("{layer}: {gemm} in high precision, unrequested: {reason}")]
    UnrequestedHighPrecision {
        /// The layer's name.
        layer: String,
        /// The GEMM.
        gemm: Gemm,
        /// Why.
        reason: String,
    },
    /// Linears of the model have lost their layers, or never had them.
    #[error(
        "{linears} linears of the model carry no layer, so that no configuration applies to them: {names}. A record that is loaded into a \
         model without FP8 layers, such as a valid() one, a quantized copy, and weights rebuilt from data have none: apply the configuration to what it is to run with"
    )]
    UntaggedLinears {
        /// How many.
        linears: usize,
        /// Their names, shortened where there are many.
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
        /// The layer's name.
        layer: String,
        /// How often `Tensor::matmul` read its weight.
        weight_matmuls: u64,
    },
    /// Codes are not the weight of a linear of the model.
    #[error("{layer}: FP8 codes {what}")]
    Codes {
        /// The layer's name.
        layer: String,
        /// What is wrong with them, with the values.
        what: String,
    },
    /// A weight without high-precision values is to be trained.
    #[error(
        "{layer}: its weight is FP8 codes alone, which no optimizer updates: freeze it (`no_grad`) and train an adapter, or keep the \
         high-precision values"
    )]
    Fp8OnlyTrained {
        /// The layer's name.
        layer: String,
    },
    /// A saved state does not belong to the model.
    #[error("the state of {layer}: {what}")]
    State {
        /// The layer's name in the state.
        layer: String,
        /// What differs, with the values.
        what: String,
    },
    /// The driver, the compiler or the headers of the device are missing, or do not fit each other.
    #[error(transparent)]
    Setup(#[from] device_select::DeviceError),
    /// A small cast and product do not come out right on the device, by any kernel.
    #[error("the device does not compute: a {what} of 64 by 64 failed on every path: {reason}")]
    Preflight {
        /// `cast` or `GEMM`.
        what: &'static str,
        /// The last failure.
        reason: String,
    },
    /// A task of the device's thread panicked, or a launch failed. Later results read memory that
    /// was never written.
    #[error("results on the device are lost: {message}")]
    Lost {
        /// The device's message.
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

/// Panics in the first backward of `Autodiff<Float8<B>>`.
pub(crate) fn wrong_order() -> ! {
    panic!(
        "Float8 wraps the backend that you train with: write `Float8<Autodiff<B>>` in place of `Autodiff<Float8<B>>`"
    )
}

/// An error, and the model that it kept from being converted or sharded, as it was.
pub struct ApplyError<M, E = Float8Error> {
    /// What is wrong.
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
