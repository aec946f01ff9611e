//! Qwen3, dense, in [Burn](burn), generic over the backend, and its training in FP8.
//!
//! ```
//! use burn::backend::Flex;
//! use burn::tensor::{Int, Tensor};
//! use qwen3::{CausalLmExt, Qwen3, Qwen3Config};
//!
//! # fn main() -> Result<(), train::JobError> {
//! let device = Default::default();
//! let model = Qwen3::<Flex>::new(Qwen3Config::preset("debug")?, &device)?.init_weights(0);
//! let logits = model.forward(Tensor::<Flex, 2, Int>::zeros([1, 8], &device));
//! assert_eq!(logits.dims(), [1, 8, 272]);
//! # Ok(())
//! # }
//! ```
//!
//! [`CausalLmExt::load_hf`] loads a Hugging Face checkpoint, [`CausalLmExt::save_hf`] writes one.
//! [`train::Job`] trains a [`Qwen3Model`] with a [`RunConfig`]; `examples/qwen3_fp8.rs` is its
//! command line.

mod config;
mod model;
mod section;

pub use config::{PRESETS, Qwen3Config};
pub use model::{DecoderLayer, Qwen3};
pub use section::{ModelSection, Qwen3Model};
pub use train::{CausalLm, CausalLmExt};

/// Configuration of a Qwen3's training run.
pub type RunConfig = train::job::RunConfig<ModelSection>;
