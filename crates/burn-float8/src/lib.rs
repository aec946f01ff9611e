//! FP8 training for any Burn model: wrap the backend, and every `nn::Linear` runs its three GEMMs in FP8.
//!
//! ```
//! # #[cfg(feature = "flex")] {
//! use burn::backend::{Autodiff, Flex};
//! use burn::nn::{Linear, LinearConfig};
//! use burn::tensor::Tensor;
//! use burn_float8::{Float8, Float8Config, report};
//!
//! type B = Autodiff<Float8<Flex>>;
//!
//! let device = Default::default();
//! let model: Linear<B> = LinearConfig::new(64, 32).init(&device);
//! let model = Float8Config::tensorwise().apply(model).unwrap();
//! let loss = model.forward(Tensor::<B, 2>::ones([8, 64], &device)).mean();
//! loss.backward();
//! assert_eq!(report(&model).totals().emulated, 2); // fprop and wgrad; nothing asked for dx
//! # }
//! ```
//!
//! Casts follow torchao (`scale = FMAX / amax`, saturating round to nearest even); see [`Recipe`]. Everything that is
//! not a linear, attention included, is forwarded to the wrapped backend unchanged.

#![warn(missing_docs)]

// Each module imports only from those above it; `tests/layers.rs` checks that.
mod terms;

pub mod profile;

mod error;

mod config;

mod backend;

mod shard;

mod layer;

mod step;

mod tensor;

mod ops;

mod stack;

mod nn;

mod model;

#[cfg(feature = "cubecl")]
pub use backend::DeviceOperand;
pub use backend::{
    DeviceCollectives, DeviceMemory, Float8Backend, GroupEnds, HostCodes, OperandSize, PendingOnDevice, Quantized,
    ScaleFrom, ShardedAxis, Shards, host,
};
pub use config::{
    AmaxComputeAlgo, CastConfig, Casts, DelayedScaling, FallbackConfig, FallbackTo, Float8Config, Float8LinearConfig,
    LayerOverride, LinearInfo, Policy, ScalingType, StatisticsConfig, Untagged,
};
pub use error::{ApplyError, Float8Error};
pub use float8_comm::{CommError, Communicator, Engine, Options as CommOptions};
pub use float8_kernels::{
    Cast, Format, GemmConfig, GemmPath, Granularity, Grouping, Orientation, ScaleCalculationMode, ScaleMode,
};
pub use layer::{CastHealth, Fallback, Layer, OperandHealth, UNTAGGED_NAME, float8_autocast};
pub use model::{
    Amaxes, Float8State, Float8StateModule, GemmReport, GemmTotals, LayerReport, LayerState, Monitor, NonFiniteOperand,
    OperandReport, PrecisionSchedule, Report, SampledOperand, ShardPlan, ShardSummary, Sharded, ShardedParameter,
    ShardingReport, Span, Summary, begin_float8_step, report, set_default_config, set_float8_enabled, without_float8,
};
pub use nn::{GroupedLinear, full_tensor, grouped_linear, linear};
pub use ops::Float8;
pub use ops::grouped::grouped_matmul;
pub use shard::{ReduceDtype, Reshard, ShardConfig, ShardError};
pub use stack::Float8Stack;
pub use step::AmaxState;
pub use tensor::Float8Tensor;
pub use terms::{Gemm, Reason, Recipe, Role};

/// Names that [`host_backend!`] writes.
#[doc(hidden)]
pub mod __private {
    pub use burn_backend::tensor::{Device, FloatTensor, IntTensor};
    pub use burn_backend::{DType, FloatDType};
    pub use burn_std::Shape;
}
