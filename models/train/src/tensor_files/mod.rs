//! Tensors in safetensors files. [`TensorFiles`] reads a file, or shards and their index.
//! [`write_file`] and [`write_shards`] write them.

mod error;
mod read;
mod write;

pub use error::TensorFilesError;
pub use read::{StoredTensor, TensorFiles};
pub use write::{NewTensor, bf16_bytes, f32_bytes, write_file, write_shards};

/// Name of a folder's only file.
const SINGLE: &str = "model.safetensors";
/// Name of the index, which lists the shard of each tensor.
const INDEX: &str = "model.safetensors.index.json";
