//! [`Checkpoint`]: folder of weights that was checked against a model's dimensions before the model
//! is allocated.

use std::collections::HashSet;
use std::path::Path;

use anyhow::bail;
use safetensors::Dtype;

use super::float8::{Float8Weight, Float8Weights};
use super::{json, names};
use crate::model::{ModelConfig, ModelSize};
use crate::{JobError, Progress, TensorFiles, TensorFilesError};

/// Rows of two matrices compared at once.
const ROWS: usize = 4096;

/// Treatment of an output layer in the files of a model that ties its output to the embedding.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum RepeatedHead {
    /// The output layer must equal the embedding.
    #[default]
    MustBeEqual,
    /// The output layer is ignored.
    IsLeftOut,
}

/// Weights with the names, shapes and dtypes of a model.
pub(crate) struct Checkpoint {
    pub(super) files: TensorFiles,
    /// Linears whose weights are in FP8.
    pub(super) float8: Float8Weights,
    /// FP8 scales and keys that are not used.
    unused: Vec<String>,
}

impl Checkpoint {
    /// Opens the folder `dir`. Reads headers, both matrices of a tied model if its files have both,
    /// and the quantization config of FP8 weights.
    ///
    /// # Errors
    /// [`JobError::MoeCheckpoint`]. [`JobError::TensorFiles`] for files that cannot be read, and
    /// for tensors that are missing, unexpected, or of another shape or dtype.
    /// [`JobError::TiedHead`]. [`JobError::Float8Files`] for FP8 weights without matching scales.
    pub(crate) fn open<C: ModelConfig>(dir: &Path, config: &C, head: RepeatedHead) -> Result<Self, JobError> {
        let tensors = config.hf_tensors(dir)?;
        let files = TensorFiles::open_folder(dir)?;
        let (float8, unused) = float8_weights(dir, &files, &tensors)?;
        let scales = files.names().filter(|name| names::is_unused_scale(name)).map(String::from);
        let unused: Vec<_> = unused.into_iter().chain(scales).collect();
        let shapes: Vec<_> = tensors.into_iter().map(|(path, shape)| (names::hf_name(&path), shape)).collect();
        let size = config.size();
        for (name, shape) in &shapes {
            let stored = files.expect(name, shape)?;
            if !matches!(stored.dtype(), Dtype::F32 | Dtype::F16 | Dtype::BF16) && !float8.contains(name) {
                let (name, dtype) = (name.clone(), format!("{:?}", stored.dtype()));
                return Err(TensorFilesError::Dtype { name, dtype, path: stored.path().into() }.into());
            }
        }
        let head_name = names::hf_name("lm_head.weight");
        let is_repeated = size.tie_word_embeddings && files.get(&head_name).is_some();
        let of_float8 = float8.scale_names().chain(unused.iter().map(String::as_str));
        let expected: HashSet<_> = shapes.iter().map(|(name, _)| name.as_str()).chain(of_float8).collect();
        let known = |name: &str| expected.contains(name) || is_repeated && name == head_name || names::is_ignored(name);
        let unexpected: Vec<_> = files.names().filter(|name| !known(name)).map(String::from).collect();
        if !unexpected.is_empty() {
            let holders: HashSet<_> =
                unexpected.iter().filter_map(|name| files.get(name)).map(|it| it.path()).collect();
            let one = holders.iter().next().filter(|_| holders.len() == 1);
            let path = one.copied().unwrap_or(files.path()).to_path_buf();
            return Err(TensorFilesError::Unexpected { names: unexpected, path }.into());
        }
        if is_repeated && head == RepeatedHead::MustBeEqual && !is_embedding(&files, &head_name, &size)? {
            bail!(
                "{}: config.json says tie_word_embeddings = true, but lm_head.weight differs from model.embed_tokens.weight: \
                 set model.tie_word_embeddings to false to take lm_head.weight, or to true to leave it out",
                dir.display()
            );
        }
        Ok(Self { files, float8, unused })
    }

    /// Warning about FP8 scales and keys of the folder that are not used, if there are any.
    pub(crate) fn unused(&self) -> Option<String> {
        let (first, count) = (self.unused.first()?, self.unused.len());
        let more = if count > 1 { format!(" and {} more of its kind are", count - 1) } else { " is".into() };
        Some(format!(
            "{}: {first}{more} not used: keys, values and inputs are cast by scales of their own",
            self.files.path().display()
        ))
    }

    /// Reads the FP8 weight `name` of a linear as stored; `None` if it is not in FP8.
    ///
    /// # Errors
    /// [`JobError::Float8Files`], [`JobError::TensorFiles`].
    pub(crate) fn float8_weight(&self, name: &str) -> Result<Option<Float8Weight>, JobError> {
        self.float8.read(&self.files, name)
    }

    /// Reads the weight `name` of a linear, `[out, in]`, in f32.
    ///
    /// # Errors
    /// The errors of [`float8_weight`](Self::float8_weight).
    pub(super) fn linear_f32(&self, name: &str, dims: [usize; 2]) -> Result<Vec<f32>, JobError> {
        match self.float8_weight(name)? {
            Some(weight) => Ok(weight.codes.dequantize()),
            None => Ok(self.files.expect(name, &dims)?.to_f32()?),
        }
    }

    /// Bytes of the tensor `name` and its scales in the files.
    pub(super) fn num_bytes(&self, name: &str) -> u64 {
        let all = std::iter::once(name).chain(self.float8.scales_of(name));
        all.filter_map(|name| self.files.get(name)).map(|stored| stored.num_bytes()).sum()
    }

    /// Progress at the beginning of a load.
    pub(super) fn progress(&self) -> Progress {
        Progress { bytes: 0, total_bytes: self.files.num_bytes() }
    }
}

/// Linears whose weights are in FP8, and a key that is not used.
fn float8_weights(
    dir: &Path,
    files: &TensorFiles,
    tensors: &[(String, Vec<usize>)],
) -> Result<(Float8Weights, Option<String>), JobError> {
    let linear = |(path, shape): &(String, Vec<usize>)| {
        let dims = <[usize; 2]>::try_from(&shape[..]).ok()?;
        names::linear(path).map(|linear| (names::weight_name(linear), dims))
    };
    let linears: Vec<_> = tensors.iter().filter_map(linear).collect();
    let is_float8 = |name: &str| files.get(name).is_some_and(|stored| stored.dtype() == Dtype::F8_E4M3);
    // The quantization config of other weights does not matter, since the files hold their values.
    if !linears.iter().any(|(name, _)| is_float8(name)) {
        return Ok(Default::default());
    }
    let quantization = json::quantization(dir)?;
    let linears = linears.iter().map(|(name, dims)| (name.as_str(), *dims));
    let found = Float8Weights::find(files, quantization.as_ref(), linears)?;
    Ok((found, quantization.and_then(|quantization| quantization.unused)))
}

/// Whether the output layer equals the embedding bit for bit, both widened to f32.
fn is_embedding(files: &TensorFiles, head: &str, size: &ModelSize) -> Result<bool, JobError> {
    let shape = [size.vocab_size, size.hidden_size];
    let [head, embedding] = [head, &names::hf_name("embed_tokens.weight")].map(|name| files.expect(name, &shape));
    let (head, embedding) = (head?, embedding?);
    for first in (0..size.vocab_size).step_by(ROWS) {
        let rows = first..size.vocab_size.min(first + ROWS);
        let [a, b] = [&head, &embedding].map(|tensor| tensor.rows_f32(rows.clone()));
        if !a?.iter().map(|value| value.to_bits()).eq(b?.iter().map(|value| value.to_bits())) {
            return Ok(false);
        }
    }
    Ok(true)
}
