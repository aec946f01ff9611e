//! Hugging Face checkpoints: [`Llama::load_hf`](crate::Llama::load_hf) reads them, [`Llama::save_hf`](crate::Llama::save_hf)
//! writes them as transformers reads them.

mod check;
mod config;
mod export;
mod files;
mod weights;

pub(crate) use check::{Checkpoint, RepeatedHead};
pub(crate) use config::is_bf16;
pub use export::{ExportDtype, ExportOptions};
pub(crate) use files::has_tokenizer;
pub use files::{copy_assets, copy_chat_template, copy_config, copy_tokenizer};
