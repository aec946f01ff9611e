//! [`Checkpoint`]: a folder of weights that were compared with a model's dimensions before anything of the model is allocated.

use std::collections::HashSet;
use std::path::Path;

use safetensors::Dtype;
use train::{Progress, TensorFiles, TensorFilesError};

use crate::Error;
use crate::config::LlamaConfig;
use crate::names;

/// Rows of two matrices that are compared at once.
const ROWS: usize = 4096;

/// What becomes of an output layer that lies in the files of a model whose output is tied to the embedding.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum RepeatedHead {
    /// It must be the embedding.
    #[default]
    MustBeEqual,
    /// It is left out, whatever it is.
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
    /// [`Error::MoeCheckpoint`]; [`Error::TensorFiles`] for files that cannot be read, and tensors that are missing or of another shape
    /// or dtype; [`Error::UnexpectedTensors`], [`Error::TiedHead`].
    pub(crate) fn open(dir: &Path, config: &LlamaConfig, head: RepeatedHead) -> Result<Self, Error> {
        if let Some(moe) = config.moe {
            return Err(Error::MoeCheckpoint { path: dir.into(), num_experts: moe.num_experts });
        }
        let files = TensorFiles::open_folder(dir)?;
        let shapes = shapes(config);
        for (name, shape) in &shapes {
            let dtype = files.expect(name, shape)?.dtype();
            if !matches!(dtype, Dtype::F32 | Dtype::F16 | Dtype::BF16) {
                let (name, dtype) = (name.clone(), format!("{dtype:?}"));
                return Err(TensorFilesError::Dtype { name, dtype, path: dir.into() }.into());
            }
        }
        let head_name = names::hf_name("lm_head.weight");
        let is_repeated = config.tie_word_embeddings && files.get(&head_name).is_some();
        let expected: HashSet<_> = shapes.iter().map(|(name, _)| name.as_str()).collect();
        let known = |name: &str| expected.contains(name) || is_repeated && name == head_name || names::is_ignored(name);
        let unexpected: Vec<_> = files.names().filter(|name| !known(name)).map(String::from).collect();
        if !unexpected.is_empty() {
            return Err(Error::UnexpectedTensors { names: unexpected, path: files.path().to_path_buf() });
        }
        if is_repeated && head == RepeatedHead::MustBeEqual && !is_embedding(&files, &head_name, config)? {
            return Err(Error::TiedHead { path: dir.into() });
        }
        Ok(Self { files })
    }

    /// How far a load is that has begun.
    pub(super) fn progress(&self) -> Progress {
        Progress { bytes: 0, total_bytes: self.files.num_bytes() }
    }
}

/// The tensors of a dense model in Hugging Face's names and layout.
fn shapes(config: &LlamaConfig) -> Vec<(String, Vec<usize>)> {
    let LlamaConfig { vocab_size, hidden_size: h, intermediate_size, head_dim, .. } = *config;
    let (q, kv) = (config.num_heads * head_dim, config.num_kv_heads * head_dim);
    let mut shapes = vec![("embed_tokens.weight".to_string(), vec![vocab_size, h])];
    for layer in 0..config.num_layers {
        let tensors = [
            ("input_layernorm.gamma", vec![h]),
            ("self_attn.q_proj.weight", vec![q, h]),
            ("self_attn.k_proj.weight", vec![kv, h]),
            ("self_attn.v_proj.weight", vec![kv, h]),
            ("self_attn.o_proj.weight", vec![h, q]),
            ("post_attention_layernorm.gamma", vec![h]),
            ("mlp.gate_proj.weight", vec![intermediate_size, h]),
            ("mlp.up_proj.weight", vec![intermediate_size, h]),
            ("mlp.down_proj.weight", vec![h, intermediate_size]),
        ];
        shapes.extend(tensors.map(|(name, shape)| (format!("layers.{layer}.{name}"), shape)));
    }
    shapes.push(("norm.gamma".into(), vec![h]));
    if !config.tie_word_embeddings {
        shapes.push(("lm_head.weight".into(), vec![vocab_size, h]));
    }
    shapes.into_iter().map(|(path, shape)| (names::hf_name(&path), shape)).collect()
}

/// Whether the output layer has the bits of the embedding, widened to f32.
fn is_embedding(files: &TensorFiles, head: &str, config: &LlamaConfig) -> Result<bool, Error> {
    let shape = [config.vocab_size, config.hidden_size];
    let [head, embedding] = [head, &names::hf_name("embed_tokens.weight")].map(|name| files.expect(name, &shape));
    let (head, embedding) = (head?, embedding?);
    for first in (0..config.vocab_size).step_by(ROWS) {
        let rows = first..config.vocab_size.min(first + ROWS);
        let [a, b] = [&head, &embedding].map(|tensor| tensor.rows_f32(rows.clone()));
        if !a?.iter().map(|value| value.to_bits()).eq(b?.iter().map(|value| value.to_bits())) {
            return Ok(false);
        }
    }
    Ok(true)
}
