//! Llama 3, 3.1 and 3.2, dense or with mixtures of experts, in [Burn](burn), generic over the
//! backend, and their training in FP8.
//!
//! The model is plain Burn: [`Llama<Flex>`](Llama) runs in f32, `Llama<Float8<Autodiff<Cuda>>>`
//! trains with FP8 linears. Names are Hugging Face's throughout, in filters and checkpoints too.
//!
//! ```
//! use burn::backend::Flex;
//! use burn::tensor::{Int, Tensor};
//! use llama3::{CausalLmExt, Llama, LlamaConfig};
//!
//! # fn main() -> Result<(), llama3::Error> {
//! let device = Default::default();
//! let model = Llama::<Flex>::new(LlamaConfig::preset("debug")?, &device)?.init_weights(0);
//! let logits = model.forward(Tensor::<Flex, 2, Int>::zeros([1, 8], &device));
//! assert_eq!(logits.dims(), [1, 8, 272]);
//! # Ok(())
//! # }
//! ```
//!
//! [`CausalLmExt::load_hf`] loads a Hugging Face checkpoint, [`CausalLmExt::save_hf`] writes one.
//! [`train::Job`] trains a [`Llama3`] with a [`RunConfig`]; `examples/llama3_fp8.rs` is its command
//! line.

pub mod config;
mod hf;
pub mod model;
pub mod moe;
pub mod presets;
pub mod rope;
mod section;

pub use config::{LlamaConfig, RopeScaling};
pub use decoder::{Dimensions, MoeConfig};
pub use model::Llama;
pub use section::{Llama3, ModelSection};
pub use train::{CausalLm, CausalLmExt, JobError as Error};

/// Configuration of a Llama's training run.
pub type RunConfig = train::job::RunConfig<ModelSection>;
