//! FP8 training for any Burn model. Wrap the backend, and every `nn::Linear` runs its three GEMMs
//! in FP8.
//!
//! ```
//! # #[cfg(feature = "flex")] {
//! use burn::backend::{Autodiff, Flex};
//! use burn::nn::{Linear, LinearConfig};
//! use burn::tensor::Tensor;
//! use burn_float8::{Float8, Float8Config, report};
//!
//! type B = Float8<Autodiff<Flex>>;
//!
//! let device = Default::default();
//! let model: Linear<B> = LinearConfig::new(64, 32).init(&device);
//! let (model, summary) = Float8Config::tensorwise().apply(model).unwrap();
//! assert_eq!(summary.converted, ["linear"]);
//! let loss = model.forward(Tensor::<B, 2>::ones([8, 64], &device)).mean();
//! loss.backward();
//! assert_eq!(report(&model).totals().emulated, 2); // fprop and wgrad; nothing asked for dx
//! # }
//! ```
//! Casts follow torchao (`scale = FMAX / amax`, saturating round to nearest even); see [`Recipe`].
//! [Attention](nn::attention) stays in high precision, as one autodiff node with memory linear in
//! the number of positions. All other operations are forwarded to the wrapped backend unchanged.
//!
//! # Features
//!
//! | feature | effect |
//! | --- | --- |
//! | `flex` (default) | the CPU backend `Flex` |
//! | `ndarray` | the CPU backend `NdArray`; Burn has deprecated it, so prefer `Flex` |
//! | `wgpu` (default) | Burn's `Wgpu` |
//! | `vulkan`, `metal` | `Wgpu` with SPIR-V or MSL shaders: Burn's `Vulkan` and `Metal` |
//! | `cuda`, `rocm` | Burn's `Cuda` and `Rocm`; builds without the toolkit |
//! | `cubecl` | `CubeBackend` and `Fusion<CubeBackend>` over any other CubeCL runtime |
//! | `distributed` | Burn's data-parallel training, `burn/distributed` |
//! | `schemars` | `JsonSchema` for configurations |

#![cfg_attr(docsrs, feature(doc_cfg))]
#![warn(missing_docs)]

// Modules import only from the modules above them; `tests/layers.rs` checks it.
mod terms;

#[doc(hidden)]
pub mod profile;

mod error;

pub mod config;

pub mod backend;

mod layer;

mod step;

mod tensor;

mod ops;

mod stack;

pub mod nn;

pub mod optim;

mod model;

#[doc(hidden)]
pub mod shard_hooks;

pub use config::{FallbackConfig, Float8Config, Float8LinearConfig, StatisticsConfig};
pub use error::{ApplyError, Float8Error};
pub use layer::float8_autocast;
pub use model::{
    Float8State, Float8StateModule, Monitor, PrecisionSchedule, Report, Span, begin_float8_step, report,
    set_default_config, set_float8_enabled, without_float8,
};
pub use nn::{GroupedLinear, grouped_linear};
pub use ops::Float8;
pub use stack::Float8Stack;
pub use tensor::{Float8Tensor, Wrapped};
pub use terms::Recipe;

/// Execution of linears, per layer and GEMM.
pub mod report {
    pub use crate::backend::SelfCheckReport;
    pub use crate::error::SelfCheckFailure;
    pub use crate::layer::{CastHealth, Fallback, GemmTotals, Layer, OperandHealth, UNTAGGED_NAME};
    pub use crate::model::{
        Amaxes, GemmReport, LayerReport, LayerState, Monitor, NonFiniteOperand, OperandReport, Report, SampledOperand,
        Summary, independent_rows, report,
    };
    pub use crate::step::AmaxState;
    pub use crate::tensor::ShardingReport;
    pub use crate::terms::{Gemm, Reason, Role};
}

/// FP8-only weights.
pub mod weights {
    pub use crate::backend::HostCodes;
    pub use crate::model::{Fp8Only, check_frozen, fp8_only, linear_infos, load_codes, read_codes};
}

/// Low-rank adapters for frozen linears.
pub mod lora {
    pub use crate::model::{Lora, LoraAdapter, LoraConfig};
}

/// Hooks for the crate float8-shard: sharded weights, and optimizer steps shared by several
/// processes.
pub mod source {
    pub use crate::step::AmaxReduce;
    pub use crate::tensor::{CastAmax, ShardedWeight, ShardingReport, SourcedWeight, WeightCache, WeightCast, shared};
}
