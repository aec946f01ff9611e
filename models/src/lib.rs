//! Llama 3, Qwen2, Qwen3, Mistral and mixtures of experts in [Burn](burn), generic over the
//! backend.
//!
//! All are one module, [`Decoder`], whose [`DecoderConfig`] names its [`Architecture`]. The module
//! is plain Burn: `Decoder<Flex>` runs in f32, `Decoder<Float8<Autodiff<Cuda>>>` trains with FP8
//! linears. Names are Hugging Face's throughout, in filters and checkpoints too.
//!
//! ```
//! use burn::backend::Flex;
//! use burn::tensor::{Int, Tensor};
//! use models::{CausalLmExt, Decoder, DecoderConfig};
//!
//! # fn main() -> anyhow::Result<()> {
//! let device = Default::default();
//! let model = Decoder::<Flex>::new(DecoderConfig::preset("qwen3-debug")?, &device)?.init_weights(0);
//! let logits = model.forward(Tensor::<Flex, 2, Int>::zeros([1, 8], &device));
//! assert_eq!(logits.dims(), [1, 8, 272]);
//! # Ok(())
//! # }
//! ```
//!
//! [`CausalLmExt::load_hf`] loads a Hugging Face checkpoint, [`CausalLmExt::save_hf`] writes one.
//! [`trainer::Job`] trains [`Decoders`] with a [`RunConfig`].

mod architecture;
pub mod attention;
mod cache;
mod config;
mod dims;
mod e4m3;
mod forward;
pub mod hf;
mod linear;
mod llama3;
mod memory;
mod mistral;
mod mlp;
mod model;
pub mod moe;
mod norm;
mod parallel;
mod qwen2;
mod qwen3;
pub mod rope;
mod rope_scaling;
mod section;

pub use architecture::{Architecture, DecoderConfig, Defaults, ScaledRope, presets};
pub use attention::{Attention, Positions};
pub use cache::{KvCache, LayerCache};
pub use config::rotary_frequencies;
pub use dims::{Dimensions, MoeConfig};
pub use forward::{Layer, Parts, Pass};
pub use linear::{INITIALIZER, linear};
pub use mlp::Mlp;
pub use model::{Decoder, DecoderLayer};
pub use norm::{norm, rms_norm};
pub use parallel::tensor_plan;
pub use rope_scaling::RopeScaling;
pub use section::{Decoders, ModelSection};
pub use trainer::{CausalLm, CausalLmExt};

/// Architectures that the program trains.
pub static ARCHITECTURES: [&Architecture; 4] =
    [&llama3::ARCHITECTURE, &qwen3::ARCHITECTURE, &qwen2::ARCHITECTURE, &mistral::ARCHITECTURE];

/// Configuration of a training run.
pub type RunConfig = trainer::job::RunConfig<ModelSection>;
