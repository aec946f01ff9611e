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
//! All other operations are forwarded to the wrapped backend unchanged.
//!
//! On CPUs FP8 is emulated. The CUDA kernels have never run on a GPU; the
//! [status page](https://github.com/burn-float8/burn-float8/blob/main/docs/dev/verified.md) lists
//! what has. The [guide](https://github.com/burn-float8/burn-float8/blob/main/docs/guide/library.md)
//! has bf16, saving and LoRA in whole programs.
//!
//! # Notation
//!
//! | symbol | meaning |
//! | --- | --- |
//! | x `[M, K]` | input of a linear; M counts all leading axes |
//! | w `[K, N]` | weight, as Burn stores it |
//! | y, dy `[M, N]` | output and its gradient |
//! | fprop, dgrad, wgrad | y = x · w, dx = dy · wᵀ, dw = xᵀ · dy |
//! | amax | largest absolute value of the elements that share a scale |
//! | code, scale | `code = round(clamp(x · scale))`, `scale = FMAX / amax` |
//! | FMAX | 448 for e4m3, 57344 for e5m2 |
//!
//! # Modules
//!
//! | item | contents |
//! | --- | --- |
//! | [`Float8`], [`Float8Stack`] | the backend, and the bound for functions that are generic over it |
//! | [`Float8Config`], [`config`], [`Recipe`] | which linears run in FP8, and how they are cast |
//! | [`mod@report`], [`Report`] | what each GEMM did; statistics |
//! | [`Float8State`], [`Float8StateModule`] | state to save and restore |
//! | [`without_float8`], [`float8_autocast`], [`set_float8_enabled`] | switches |
//! | [`nn`] | grouped linears, attention and fused functions for models |
//! | [`lora`], [`weights`] | adapters; FP8-only weights |
//! | [`optim`] | AdamW in one pass |
//! | [`backend`] | the trait of backends that `Float8` can wrap |
//!
//! # Sources
//!
//! - Casts, recipes and names: [torchao], commit 36027d82. MX: [OCP MX 1.0].
//! - Delayed scaling: [TransformerEngine]. Blocks of 1×128 and 128×128: [DeepSeek-V3].
//! - LoRA: [Hu et al.], names as in [PEFT].
//!
//! [torchao]: https://github.com/pytorch/ao/tree/36027d82/torchao/float8
//! [OCP MX 1.0]: https://www.opencompute.org/documents/ocp-microscaling-formats-mx-v1-0-spec-final-pdf
//! [TransformerEngine]: https://github.com/NVIDIA/TransformerEngine
//! [DeepSeek-V3]: https://arxiv.org/abs/2412.19437
//! [Hu et al.]: https://arxiv.org/abs/2106.09685
//! [PEFT]: https://github.com/huggingface/peft
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

/// FP8-only weights: codes and scales instead of values, one byte per parameter.
///
/// [`fp8_only`](weights::fp8_only) drops the values of a model's FP8 linears.
/// [`load_codes`](weights::load_codes) and [`read_codes`](weights::read_codes) exchange codes
/// `[N, K]` and scales with files. A gradient of such a weight is an error, so freeze it and train
/// [adapters](crate::lora).
pub mod weights {
    pub use crate::backend::HostCodes;
    pub use crate::model::{Fp8Only, check_frozen, fp8_only, linear_infos, load_codes, read_codes};
}

/// Low-rank adapters for frozen linears: y = x·w + α/r · (x·A)·B, with A `[K, r]` and B `[r, N]`.
///
/// An optimizer trains [`Lora`](lora::Lora), a module of its own, and
/// [`attach`](lora::Lora::attach) adds it to a model for one forward. See there for an example.
pub mod lora {
    pub use crate::model::{Lora, LoraAdapter, LoraConfig};
}
