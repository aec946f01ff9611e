//! [`ModelSection`]: the section `[model]` of a Llama's configuration, and [`Llama3`], which trains it.

use std::path::{Path, PathBuf};

use burn::tensor::backend::{AutodiffBackend, Backend};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use train::{JobError, TrainableModel};

use crate::config::{LlamaConfig, MoeConfig, RopeScaling};
use crate::model::Llama;

/// The model: a preset with changes, or a Hugging Face checkpoint.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct ModelSection {
    /// A size by name: `debug` and `debug_moe` (a mixture of experts), which train on a CPU; `1b` and `3b` of Llama 3.2; `8b`, `70b` and
    /// `405b` of Llama 3.1. If absent, `debug`.
    pub preset: Option<String>,
    /// Folder of a Hugging Face checkpoint to start from: its `config.json` decides the model, so of this section only
    /// `tie_word_embeddings` may be given too. Given with `--set`, it replaces the file's `preset`.
    pub hf_path: Option<PathBuf>,
    /// Tokens in the vocabulary, no fewer than the tokenizer's. If absent, the preset's.
    pub vocab_size: Option<usize>,
    /// Width of the residual stream. If absent, the preset's.
    pub hidden_size: Option<usize>,
    /// Width of the SwiGLU, or of that of one expert. If absent, the preset's.
    pub intermediate_size: Option<usize>,
    /// Decoder layers. If absent, the preset's.
    pub num_layers: Option<usize>,
    /// Query heads. If absent, the preset's.
    pub num_heads: Option<usize>,
    /// Key and value heads; must divide `num_heads`. If absent, the preset's.
    pub num_kv_heads: Option<usize>,
    /// Width of one head; must be even. If absent, the preset's.
    pub head_dim: Option<usize>,
    /// Added to the mean square in RMSNorm. If absent, the preset's.
    pub rms_norm_eps: Option<f64>,
    /// Base of the rotary frequencies. If absent, the preset's.
    pub rope_theta: Option<f64>,
    /// Frequency scaling of Llama 3.1 and later. If absent, the preset's; a preset's cannot be removed.
    pub rope_scaling: Option<RopeScaling>,
    /// Positions of the model: neither `training.seq_len` nor prompt and sample together may be longer. If absent, the preset's.
    pub max_seq_len: Option<usize>,
    /// Whether the output layer is the transposed embedding. If absent, the preset's, or the checkpoint's. With `hf_path` it decides for a
    /// checkpoint that is tied and has an output layer of its own: `false` takes it, `true` leaves it out.
    pub tie_word_embeddings: Option<bool>,
    /// A mixture of experts in place of each SwiGLU. If absent, the preset's; a preset's cannot be removed.
    pub moe: Option<MoeConfig>,
}

impl train::ModelSection for ModelSection {
    type Config = LlamaConfig;

    fn of_folder(hf_path: Option<PathBuf>, tie_word_embeddings: Option<bool>) -> Self {
        Self { hf_path, tie_word_embeddings, ..Self::default() }
    }

    fn preset(&self) -> &str {
        self.preset.as_deref().unwrap_or("debug")
    }

    fn hf_path(&self) -> Option<&Path> {
        self.hf_path.as_deref()
    }

    fn tie_word_embeddings(&self) -> Option<bool> {
        self.tie_word_embeddings
    }

    fn to_config(&self) -> Result<LlamaConfig, JobError> {
        let mut config = LlamaConfig::preset(self.preset())?;
        macro_rules! replace {
            ($($field:ident),*) => {$(
                if let Some(value) = self.$field { config.$field = value; }
            )*};
        }
        replace!(vocab_size, hidden_size, intermediate_size, num_layers, num_heads, num_kv_heads, head_dim);
        replace!(rms_norm_eps, rope_theta, max_seq_len, tie_word_embeddings);
        config.rope_scaling = self.rope_scaling.or(config.rope_scaling);
        config.moe = self.moe.or(config.moe);
        Ok(config)
    }
}

/// Llama 3, 3.1 and 3.2, as a [`Job`](train::Job) trains it.
#[derive(Clone, Copy, Debug)]
pub enum Llama3 {}

impl TrainableModel for Llama3 {
    const NAME: &'static str = "llama3";
    const TITLE: &'static str = "Llama 3 in FP8.";
    type Section = ModelSection;
    type Config = LlamaConfig;
    type Module<B: Backend> = Llama<B>;
    type Trained<B: AutodiffBackend> = Llama<B>;
}
