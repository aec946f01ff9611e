//! Writes tensors one by one, into one file or into shards with an index.

use std::borrow::Cow;
use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::Path;

use anyhow::{Context, Error, Result, anyhow, bail};
use half::bf16;
use safetensors::tensor::View;
use safetensors::{Dtype, SafeTensorError};
use serde_json::json;

use super::{INDEX, SINGLE};
use crate::atomic;

/// Tensor to write.
pub struct NewTensor<'a> {
    /// Name in the file.
    pub name: String,
    /// Dtype of the elements.
    pub dtype: Dtype,
    /// Shape, slowest dimension first.
    pub shape: Vec<usize>,
    /// Returns the elements, row-major and little-endian. Called when the tensor is written.
    pub bytes: Box<dyn Fn() -> Result<Vec<u8>> + 'a>,
}

impl<'a> NewTensor<'a> {
    /// Tensor whose elements are `bytes`.
    pub fn new(name: String, dtype: Dtype, shape: Vec<usize>, bytes: impl Fn() -> Result<Vec<u8>> + 'a) -> Self {
        Self { name, dtype, shape, bytes: Box::new(bytes) }
    }

    /// Size in a file in bytes; `None` if it overflows or is not a whole number of bytes.
    fn len(&self) -> Option<usize> {
        let bits = self.shape.iter().try_fold(self.dtype.bitsize(), |bits, &size| bits.checked_mul(size))?;
        bits.is_multiple_of(8).then_some(bits / 8)
    }
}

/// Little-endian bytes of `values`.
pub fn f32_bytes(values: &[f32]) -> Vec<u8> {
    encode(values, f32::to_le_bytes)
}

/// Little-endian bytes of `values` in bf16, rounded to nearest, ties to even.
pub fn bf16_bytes(values: &[f32]) -> Vec<u8> {
    encode(values, |value| bf16::from_f32(value).to_le_bytes())
}

fn encode<const N: usize>(values: &[f32], convert: impl Fn(f32) -> [u8; N]) -> Vec<u8> {
    let mut bytes = vec![0; values.len() * N];
    for (slot, &value) in bytes.as_chunks_mut().0.iter_mut().zip(values) {
        *slot = convert(value);
    }
    bytes
}

/// Writes `tensors` to the file `path`, replacing it. Their order is safetensors': by dtype, then
/// by name.
///
/// `metadata` is the header's `__metadata__`; transformers expects `{"format": "pt"}`. Several
/// entries are written in any order.
///
/// # Errors
/// The error of the first tensor whose bytes cannot be read; a duplicate name, bytes that do not
/// fit the shape. A file that cannot be written: an [`io::Error`](std::io::Error) with the path as
/// context.
/// After an error the old file is unchanged.
pub fn write_file(path: &Path, tensors: &[NewTensor<'_>], metadata: Option<HashMap<String, String>>) -> Result<()> {
    let failure = RefCell::new(None);
    let mut names = BTreeSet::new();
    let mut views = Vec::new();
    for tensor in tensors {
        if !names.insert(&tensor.name) {
            return Err(twice(path, &tensor.name));
        }
        let Some(len) = tensor.len() else {
            let NewTensor { name, dtype, shape, .. } = tensor;
            bail!("cannot write {}: {name} {shape:?} of {dtype:?} is no number of bytes", path.display());
        };
        views.push((&tensor.name, Streamed { tensor, len, failure: &failure }));
    }
    let cannot = || format!("cannot write {}", path.display());
    let file = atomic::create(path).with_context(cannot)?;
    let written = safetensors::serialize_to_file(views, metadata, file.path());
    if let Some(failure) = failure.take() {
        return Err(failure);
    }
    match written {
        Err(SafeTensorError::IoError(source)) => Err(source).with_context(cannot),
        Err(other) => bail!("{}: {other}", cannot()),
        Ok(()) => atomic::finish(file, path).with_context(cannot),
    }
}

/// Writes `tensors` into `folder` as `model.safetensors`. If they take more than `max_shard_bytes`,
/// writes shards `model-00001-of-0000N.safetensors` and `model.safetensors.index.json`, as
/// transformers' `save_pretrained` does.
///
/// Shards are filled in the order of `tensors`. A tensor larger than `max_shard_bytes` gets a
/// separate shard.
///
/// # Errors
/// The errors of [`write_file`]. Shards written before the error remain.
pub fn write_shards(folder: &Path, tensors: &[NewTensor<'_>], max_shard_bytes: u64) -> Result<()> {
    let metadata = || Some(HashMap::from([("format".to_string(), "pt".to_string())]));
    let size = |tensor: &NewTensor<'_>| tensor.len().map_or(u64::MAX, |len| len as u64);
    let (mut shards, mut first, mut filled, mut total) = (Vec::new(), 0, 0_u64, 0_u64);
    for (i, tensor) in tensors.iter().enumerate() {
        let size = size(tensor);
        if i > first && filled.saturating_add(size) > max_shard_bytes {
            shards.push(&tensors[first..i]);
            (first, filled) = (i, 0);
        }
        filled = filled.saturating_add(size);
        total = total.saturating_add(size);
    }
    shards.push(&tensors[first..]);
    if let [all] = shards[..] {
        return write_file(&folder.join(SINGLE), all, metadata());
    }
    let mut weight_map = BTreeMap::new();
    for (i, shard) in shards.iter().enumerate() {
        let file = format!("model-{:05}-of-{:05}.safetensors", i + 1, shards.len());
        write_file(&folder.join(&file), shard, metadata())?;
        for tensor in *shard {
            if weight_map.insert(&tensor.name, file.clone()).is_some() {
                return Err(twice(&folder.join(&file), &tensor.name));
            }
        }
    }
    let index = json!({"metadata": {"total_size": total}, "weight_map": weight_map});
    let path = folder.join(INDEX);
    atomic::replace_json(&path, &index).with_context(|| format!("cannot write {}", path.display()))
}

fn twice(path: &Path, name: &str) -> Error {
    anyhow!("cannot write {}: two tensors are called {name}", path.display())
}

/// [`View`] cannot fail. The first failure is kept, and tensors are empty after it.
struct Streamed<'a> {
    tensor: &'a NewTensor<'a>,
    len: usize,
    failure: &'a RefCell<Option<Error>>,
}

impl View for Streamed<'_> {
    fn dtype(&self) -> Dtype {
        self.tensor.dtype
    }

    fn shape(&self) -> &[usize] {
        &self.tensor.shape
    }

    fn data(&self) -> Cow<'_, [u8]> {
        if self.failure.borrow().is_some() {
            return Cow::Borrowed(&[]);
        }
        let failure = match (self.tensor.bytes)() {
            Ok(bytes) if bytes.len() == self.len => return bytes.into(),
            Ok(bytes) => anyhow!("{} has {} bytes, its shape says {}", self.tensor.name, bytes.len(), self.len),
            Err(failure) => failure,
        };
        *self.failure.borrow_mut() = Some(failure);
        Cow::Borrowed(&[])
    }

    fn data_len(&self) -> usize {
        self.len
    }
}
