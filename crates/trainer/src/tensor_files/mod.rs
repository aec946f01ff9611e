//! Tensors in safetensors files. [`TensorFiles`] reads a file, or shards and their index.
//! [`write_file`] and [`write_shards`] write them.

mod read;
mod write;

use std::path::Path;

use anyhow::{Error, anyhow};
pub use read::{StoredTensor, TensorFiles};
pub use write::{NewTensor, bf16_bytes, f32_bytes, write_file, write_shards};

/// Name of a folder's only file.
const SINGLE: &str = "model.safetensors";
/// Name of the index, which lists the shard of each tensor.
const INDEX: &str = "model.safetensors.index.json";

/// Error of a tensor that is in no file.
pub(crate) fn missing(path: &Path, name: &str, shape: &[usize]) -> Error {
    anyhow!("{} lacks the tensor {name} {shape:?}", path.display())
}

/// Error of a tensor with another shape than the model's.
pub(crate) fn other_shape(path: &Path, name: &str, found: &[usize], expected: &[usize]) -> Error {
    anyhow!("{}: {name} has shape {found:?}, the model needs {expected:?}", path.display())
}

/// Error of a tensor whose dtype is not read.
pub(crate) fn other_dtype(tensor: StoredTensor<'_>) -> Error {
    let (path, name, dtype) = (tensor.path().display(), tensor.name(), tensor.dtype());
    anyhow!("{path}: {name} has dtype {dtype:?}; F32, F16, BF16 and, of linears, F8_E4M3 are read")
}

/// Error of tensors that the model does not have. Lists at most five.
pub(crate) fn unexpected(path: &Path, names: &[&str]) -> Error {
    const SHOWN: usize = 5;
    let more = match names.len().saturating_sub(SHOWN) {
        0 => String::new(),
        more => format!(", and {more} more"),
    };
    let names = names[..names.len().min(SHOWN)].join(", ");
    anyhow!("{} holds tensors that the model does not have: {names}{more}", path.display())
}
