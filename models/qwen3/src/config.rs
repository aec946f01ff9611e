//! [`Qwen3Config`]: dimensions of a Qwen3, its published sizes, and Hugging Face's `config.json`.

use std::path::Path;

use anyhow::{Result, bail};
use decoder::Dimensions;
use decoder::hf::{Defaults, FUSED_LINEARS};
use serde_json::{Value, json};
use train::hf::HfReader;
use train::{BatchShape, ByteTokenizer, LayerBytes, ModelConfig, ModelSize};

/// Names for [`Qwen3Config::preset`].
pub const PRESETS: [&str; 7] = ["debug", "0.6b", "1.7b", "4b", "8b", "14b", "32b"];

/// Defaults of transformers for missing keys.
const DEFAULTS: Defaults = Defaults {
    vocab_size: 151_936,
    intermediate_size: 22_016,
    num_kv_heads: Some(32),
    head_dim: Some(128),
    max_seq_len: 32_768,
};

/// Dimensions of a Qwen3 model. [`validate`](ModelConfig::validate) is called before a model is
/// built.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Qwen3Config {
    /// Sizes. `qk_norm` is always true, `moe` is always `None`.
    pub dims: Dimensions,
}

impl Qwen3Config {
    /// Dimensions of the preset `name`: `debug` (byte tokens, trains on a CPU in minutes), or a
    /// published size.
    ///
    /// # Errors
    /// An unknown preset.
    pub fn preset(name: &str) -> Result<Self> {
        Ok(match name {
            "debug" => debug(),
            "0.6b" => published(1024, 3072, 28, 16, true),
            "1.7b" => published(2048, 6144, 28, 16, true),
            "4b" => published(2560, 9728, 36, 32, true),
            "8b" => published(4096, 12_288, 36, 32, false),
            "14b" => published(5120, 17_408, 40, 40, false),
            "32b" => published(5120, 25_600, 64, 64, false),
            _ => bail!("unknown model preset `{name}`; there are {}", PRESETS.join(", ")),
        })
    }
}

fn debug() -> Qwen3Config {
    let dims = Dimensions {
        vocab_size: ByteTokenizer::PADDED_VOCAB_SIZE,
        head_dim: 32,
        num_kv_heads: 2,
        rope_theta: 10_000.0,
        max_seq_len: 1024,
        ..published(128, 384, 4, 4, true).dims
    };
    Qwen3Config { dims }
}

fn published(hidden: usize, intermediate: usize, layers: usize, heads: usize, tied: bool) -> Qwen3Config {
    let dims = Dimensions {
        vocab_size: 151_936,
        hidden_size: hidden,
        intermediate_size: intermediate,
        num_layers: layers,
        num_heads: heads,
        num_kv_heads: 8,
        head_dim: 128,
        rms_norm_eps: 1e-6,
        rope_theta: 1_000_000.0,
        max_seq_len: 40_960,
        tie_word_embeddings: tied,
        qk_norm: true,
        moe: None,
    };
    Qwen3Config { dims }
}

impl ModelConfig for Qwen3Config {
    fn validate(&self) -> Result<()> {
        self.dims.validate()
    }

    fn size(&self) -> ModelSize {
        self.dims.size()
    }

    fn layer_bytes(&self, shape: &BatchShape) -> LayerBytes {
        self.dims.layer_bytes(shape)
    }

    fn with_max_seq_len(self, max_seq_len: usize) -> Self {
        Self { dims: Dimensions { max_seq_len, ..self.dims } }
    }

    fn with_tie_word_embeddings(self, tie_word_embeddings: bool) -> Self {
        Self { dims: Dimensions { tie_word_embeddings, ..self.dims } }
    }

    fn high_precision_linears(&self) -> Vec<&'static str> {
        if self.dims.tie_word_embeddings { vec![] } else { vec!["lm_head"] }
    }

    fn fused_linears(&self) -> Vec<&'static [&'static str]> {
        FUSED_LINEARS.to_vec()
    }

    fn from_hf(json: &HfReader<'_>) -> Result<Self> {
        let (dims, scaled) = decoder::hf::read(json, "qwen3", &DEFAULTS)?;
        if let Some(rope) = scaled {
            return Err(rope.json.unsupported(rope.key, "only default is"));
        }
        if json.boolean("use_sliding_window")?.unwrap_or(false) {
            return Err(json.unsupported("use_sliding_window", "every layer attends to all positions"));
        }
        let is_full =
            |layers: &Value| layers.as_array().is_some_and(|all| all.iter().all(|layer| layer == "full_attention"));
        if json.get("layer_types").is_some_and(|layers| !is_full(layers)) {
            return Err(json.unsupported("layer_types", "only full_attention is"));
        }
        Ok(Self { dims: Dimensions { qk_norm: true, ..dims } })
    }

    fn to_hf(&self) -> Result<Vec<(&'static str, Value)>> {
        let mut keys = decoder::hf::write(&self.dims, "qwen3", "Qwen3ForCausalLM");
        keys.extend([("use_sliding_window", json!(false)), ("sliding_window", Value::Null)]);
        keys.push(("layer_types", json!(vec!["full_attention"; self.dims.num_layers])));
        Ok(keys)
    }

    fn hf_tensors(&self, _: &Path) -> Result<Vec<(String, Vec<usize>)>> {
        Ok(self.dims.hf_tensors())
    }
}
