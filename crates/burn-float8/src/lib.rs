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

mod apply;
mod backend;
mod config;
mod convert;
mod copies;
#[cfg(feature = "cubecl")]
mod cube;
mod delayed;
pub mod device;
mod error;
mod forward;
#[cfg(feature = "cubecl")]
mod fusion;
mod group;
mod grouped;
mod grouped_module;
mod health;
pub mod host;
mod layer;
mod linear;
mod report;
mod saved;
mod schedule;
mod state;
mod table;
mod tensor;

pub use apply::Summary;
pub use backend::{
    Copies, Extent, Float8, Float8Backend, Float8Ops, GemmPath, HostCodes, ScaleFrom, UNTAGGED_NAME, set_default_config,
};
pub use config::{
    AmaxComputeAlgo, CastConfig, Casts, DelayedScaling, FallbackConfig, FallbackTo, Float8Config, Float8LinearConfig,
    LayerOverride, Recipe, ScalingType, StatisticsConfig,
};
pub use delayed::AmaxState;
pub use error::Float8Error;
pub use float8_kernels::{
    Cast, Format, GemmConfig, Granularity, Grouping, Orientation, ScaleCalculationMode, ScaleMode,
};
pub use grouped::{grouped_linear, grouped_matmul};
pub use grouped_module::GroupedLinear;
pub use health::{CastHealth, Fallback, OperandHealth};
pub use layer::{Gemm, Layer, Policy, Reason, Role};
pub use report::{GemmReport, GemmTotals, LayerReport, OperandReport, Report, report};
pub use saved::linear;
pub use schedule::{PrecisionSchedule, Span, set_float8_enabled};
pub use state::{Float8State, LayerState, begin_float8_step};
pub use tensor::Float8Tensor;

/// Names that [`host_backend!`] writes.
#[doc(hidden)]
pub mod __private {
    pub use burn_backend::tensor::{Device, FloatTensor, IntTensor};
    pub use burn_backend::{DType, FloatDType};
    pub use burn_std::Shape;
}
