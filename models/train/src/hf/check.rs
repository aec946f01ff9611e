//! [`Checkpoint`]: a folder of weights that were compared with a model's dimensions before anything of the model is allocated.

use std::collections::HashSet;
use std::path::Path;

use safetensors::Dtype;

use super::names;
use crate::model::{ModelConfig, ModelSize};
use crate::{JobError, Progress, TensorFiles, TensorFilesError};

/// Rows of two matrices that are compared at once.
const ROWS: usize = 4096;

/// What becomes of an output layer that lies in the files of a model whose output is tied to the embedding.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum RepeatedHead {
    /// The output layer must be the embedding.
    #[default]
    MustBeEqual,
    /// The output layer is left out, whatever it is.
    IsLeftOut,
}

/// Weights whose names, shapes and dtypes are those of a model.
pub(crate) struct Checkpoint {
    pub(super) files: TensorFiles,
}

impl Checkpoint {
    /// Opens the folder `dir`. Only headers are read, and two matrices if a tied model's files have both.
    ///
    /// # Errors
    /// [`JobError::MoeCheckpoint`]; [`JobError::TensorFiles`] for files that cannot be read, and tensors that are missing, of another shape
    /// or dtype, or not the model's; [`JobError::TiedHead`].
    pub(crate) fn open<C: ModelConfig>(dir: &Path, config: &C, head: RepeatedHead) -> Result<Self, JobError> {
        let tensors = config.hf_tensors(dir)?;
        let shapes: Vec<_> = tensors.into_iter().map(|(path, shape)| (names::hf_name(&path), shape)).collect();
        let files = TensorFiles::open_folder(dir)?;
        let size = config.size();
        for (name, shape) in &shapes {
            let dtype = files.expect(name, shape)?.dtype();
            if !matches!(dtype, Dtype::F32 | Dtype::F16 | Dtype::BF16) {
                let (name, dtype) = (name.clone(), format!("{dtype:?}"));
                return Err(TensorFilesError::Dtype { name, dtype, path: dir.into() }.into());
            }
        }
        let head_name = names::hf_name("lm_head.weight");
        let is_repeated = size.tie_word_embeddings && files.get(&head_name).is_some();
        let expected: HashSet<_> = shapes.iter().map(|(name, _)| name.as_str()).collect();
        let known = |name: &str| expected.contains(name) || is_repeated && name == head_name || names::is_ignored(name);
        let unexpected: Vec<_> = files.names().filter(|name| !known(name)).map(String::from).collect();
        if !unexpected.is_empty() {
            return Err(TensorFilesError::Unexpected { names: unexpected, path: files.path().to_path_buf() }.into());
        }
        if is_repeated && head == RepeatedHead::MustBeEqual && !is_embedding(&files, &head_name, &size)? {
            return Err(JobError::TiedHead { path: dir.into() });
        }
        Ok(Self { files })
    }

    /// How far a load is that has begun.
    pub(super) fn progress(&self) -> Progress {
        Progress { bytes: 0, total_bytes: self.files.num_bytes() }
    }
}

/// Whether the output layer has the bits of the embedding, widened to f32.
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
