//! [`ModelSection`]: section `[model]` of a run's configuration, and [`Decoders`], its
//! [`TrainableModel`].

use std::path::{Path, PathBuf};

use burn::tensor::backend::{AutodiffBackend, Backend};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use trainer::TrainableModel;

use crate::architecture::{Architecture, DecoderConfig};
use crate::dims::refused;
use crate::model::Decoder;

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
    /// Folder of a Hugging Face checkpoint to start from. Its `config.json` defines the model, so
    /// `type` and `preset` may not be set too. With `--set`, it replaces the file's `preset`.
    pub hf_path: Option<PathBuf>,
    /// Keys of the model's `config.json` to change, by Hugging Face's names:
    /// `{ num_hidden_layers = 2, rope_theta = 1e6 }`. With `hf_path`, `tie_word_embeddings` also
    /// selects the output layer of a tied checkpoint that has a separate one: `false` uses it,
    /// `true` drops it. `num_experts` and `num_experts_per_tok` replace each SwiGLU by a mixture of
    /// experts, which are `intermediate_size` wide.
    #[serde(skip_serializing_if = "Map::is_empty", deserialize_with = "trainer::config::variables")]
    pub overrides: Map<String, Value>,
}

impl trainer::ModelSection for ModelSection {
    type Config = DecoderConfig;

    fn of_folder(hf_path: PathBuf, overrides: Map<String, Value>) -> Self {
        Self { hf_path: Some(hf_path), overrides, ..Self::default() }
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

    fn overrides(&self) -> &Map<String, Value> {
        &self.overrides
    }

    fn preset_config(&self) -> anyhow::Result<DecoderConfig> {
        let architecture = self.r#type.as_deref().map(Architecture::named).transpose()?;
        let config = DecoderConfig::preset(&self.preset())?;
        match architecture.filter(|architecture| *architecture != config.architecture) {
            Some(other) => {
                let reason = format!("contradicts preset {}, which is a {}", self.preset(), config.architecture.name);
                Err(refused("type", other.name, reason))
            }
            None => Ok(config),
        }
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
