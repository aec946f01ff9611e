//! Llama 3
pub mod attention;
mod checkpoint;
pub mod config;
mod error;
mod hf_config;
mod hf_weights;
mod init;
pub mod model;
pub mod names;
pub mod presets;
pub mod rng;
pub mod rope;
pub mod tokenizer;
pub use config::{LlamaConfig, RopeScaling};
pub use error::Error;
pub use model::Llama;
