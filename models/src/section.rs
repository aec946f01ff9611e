//! [`ModelSection`]: section `[model]` of a run's configuration, and [`Decoders`], its
//! [`TrainableModel`].

use std::path::{Path, PathBuf};

use burn::tensor::backend::{AutodiffBackend, Backend};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use trainer::TrainableModel;

use crate::architecture::{Architecture, DecoderConfig};
use crate::dims::{MoeConfig, refused};
use crate::model::Decoder;
use crate::rope_scaling::RopeScaling;

/// Model: a preset with changes, or a Hugging Face checkpoint.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct ModelSection {
    /// Architecture: `llama3`, `qwen3`, `qwen2` or `mistral`. If absent, the preset's or the
    /// checkpoint's, else `llama3`.
    pub r#type: Option<String>,
    /// Architecture and size, such as `llama3-8b`. `llama3` has `1b` and `3b` (Llama 3.2), `8b`,
    /// `70b` and `405b` (Llama 3.1); `qwen3` `0.6b`, `1.7b`, `4b`, `8b`, `14b` and `32b`; `qwen2`
    /// (Qwen2.5) `0.5b`, `1.5b` and `7b`; `mistral` `7b`. Each has `debug`, which trains on a CPU,
    /// and `llama3` has `debug-moe`, a mixture of experts. If absent, `debug` of the type.
    pub preset: Option<String>,
    /// Folder of a Hugging Face checkpoint to start from. Its `config.json` defines the
    /// model, so only `tie_word_embeddings` of this section may be set too. With `--set`,
    /// it replaces the file's `preset`.
    pub hf_path: Option<std::path::PathBuf>,
    /// Vocabulary size, at least the tokenizer's. If absent, the preset's.
    pub vocab_size: Option<usize>,
    /// Width of the residual stream. If absent, the preset's.
    pub hidden_size: Option<usize>,
    /// Width of the SwiGLU. If absent, the preset's.
    pub intermediate_size: Option<usize>,
    /// Number of decoder layers. If absent, the preset's.
    pub num_layers: Option<usize>,
    /// Number of query heads. If absent, the preset's.
    pub num_heads: Option<usize>,
    /// Number of key and value heads; must divide `num_heads`. If absent, the preset's.
    pub num_kv_heads: Option<usize>,
    /// Width of one head; must be even. If absent, the preset's.
    pub head_dim: Option<usize>,
    /// Added to the mean square in RMSNorm. If absent, the preset's.
    pub rms_norm_eps: Option<f64>,
    /// Base of the rotary frequencies. If absent, the preset's.
    pub rope_theta: Option<f64>,
    /// Number of positions. `training.seq_len`, and prompt and sample together, may not be
    /// longer. If absent, the preset's.
    pub max_seq_len: Option<usize>,
    /// Whether the output layer is the transposed embedding. If absent, the preset's or the
    /// checkpoint's. With `hf_path`, it also selects the output layer of a tied checkpoint
    /// that has a separate one: `false` uses it, `true` drops it.
    pub tie_word_embeddings: Option<bool>,
    /// Frequency scaling of Llama 3.1 and later. If absent, the preset's, which cannot be removed.
    pub rope_scaling: Option<RopeScaling>,
    /// Mixture of experts that replaces each SwiGLU, with experts `intermediate_size` wide. If
    /// absent, the preset's, which cannot be removed.
    pub moe: Option<MoeConfig>,
}

impl trainer::ModelSection for ModelSection {
    type Config = DecoderConfig;

    fn of_folder(hf_path: Option<PathBuf>, tie_word_embeddings: Option<bool>) -> Self {
        Self { hf_path, tie_word_embeddings, ..Self::default() }
    }

    fn preset(&self) -> String {
        match (&self.preset, &self.r#type) {
            (Some(preset), _) => preset.clone(),
            (None, Some(architecture)) => format!("{architecture}-debug"),
            (None, None) => "debug".into(),
        }
    }

    fn hf_path(&self) -> Option<&Path> {
        self.hf_path.as_deref()
    }

    fn tie_word_embeddings(&self) -> Option<bool> {
        self.tie_word_embeddings
    }

    fn to_config(&self) -> anyhow::Result<DecoderConfig> {
        let architecture = self.r#type.as_deref().map(Architecture::named).transpose()?;
        let mut config = DecoderConfig::preset(&self.preset())?;
        if let Some(other) = architecture.filter(|architecture| *architecture != config.architecture) {
            let reason = format!("contradicts preset {}, which is a {}", self.preset(), config.architecture.name);
            return Err(refused("type", other.name, reason));
        }
        let dims = &mut config.dims;
        set(&mut dims.vocab_size, self.vocab_size);
        set(&mut dims.hidden_size, self.hidden_size);
        set(&mut dims.intermediate_size, self.intermediate_size);
        set(&mut dims.num_layers, self.num_layers);
        set(&mut dims.num_heads, self.num_heads);
        set(&mut dims.num_kv_heads, self.num_kv_heads);
        set(&mut dims.head_dim, self.head_dim);
        set(&mut dims.rms_norm_eps, self.rms_norm_eps);
        set(&mut dims.rope_theta, self.rope_theta);
        set(&mut dims.max_seq_len, self.max_seq_len);
        set(&mut dims.tie_word_embeddings, self.tie_word_embeddings);
        dims.moe = self.moe.or(dims.moe);
        config.rope_scaling = self.rope_scaling.or(config.rope_scaling);
        Ok(config)
    }
}

/// Sets a field if there is a value.
fn set<T>(field: &mut T, value: Option<T>) {
    if let Some(value) = value {
        *field = value;
    }
}

/// Every [`Architecture`] as a [`TrainableModel`].
#[derive(Clone, Copy, Debug)]
pub enum Decoders {}

impl TrainableModel for Decoders {
    type Section = ModelSection;
    type Config = DecoderConfig;
    type Module<B: Backend> = Decoder<B>;
    type Trained<B: AutodiffBackend> = Decoder<B>;
}
