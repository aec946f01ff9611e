//! Hugging Face checkpoints of any [`ModelConfig`](crate::ModelConfig).
//! [`CausalLmExt::load_hf`](crate::CausalLmExt::load_hf) reads them, and
//! [`CausalLmExt::save_hf`](crate::CausalLmExt::save_hf) writes them for transformers.

pub(crate) mod base;
mod checkpoint;
mod export;
mod files;
mod float8;
mod float8_export;
mod json;
pub mod names;
mod parameters;
pub(crate) mod peft;
mod reader;
mod weights;

pub(crate) use checkpoint::{Checkpoint, Float8Folder, RepeatedHead};
pub use export::{ExportDtype, ExportOptions};
pub(crate) use export::{save, share_left};
pub use files::{copy_assets, copy_chat_template, copy_config, copy_tokenizer};
pub(crate) use files::{has_tokenizer, is_asset};
pub(crate) use float8::quantize;
pub use float8_export::Float8Export;
pub(crate) use json::is_bf16;
pub use json::read_config;
pub use reader::HfReader;
