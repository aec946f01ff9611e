//! Llama 3, 3.1 and 3.2, dense or with mixtures of experts, in [Burn](burn), generic over the backend, and their training in FP8.
//!
//! The model is plain Burn: [`Llama<Flex>`](Llama) runs in f32, `Llama<Float8<Autodiff<Cuda>>>` trains with FP8
//! linears. Names are Hugging Face's throughout, so filters and checkpoints read as users know them.
//!
//! ```
//! use burn::backend::Flex;
//! use burn::tensor::{Int, Tensor};
//! use llama3::{Llama, LlamaConfig};
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
//! [`Llama::load_hf`] loads a Hugging Face checkpoint, [`Llama::save_hf`] writes one; [`trainer::train`] is the loop behind
//! `examples/llama3_fp8.rs`, configured by a [`RunConfig`].

mod announce;
pub mod attention;
pub mod cli;
pub mod config;
mod error;
pub mod generate;
pub mod hf;
mod init;
pub mod jobs;
mod linear;
mod memory;
pub mod model;
pub mod moe;
pub mod names;
pub mod presets;
pub mod rope;
pub mod run_config;
pub mod text;
pub mod trainer;
pub mod weights;

pub use config::{LlamaConfig, MoeConfig, RopeScaling};
pub use error::Error;
pub use model::Llama;
pub use run_config::RunConfig;
