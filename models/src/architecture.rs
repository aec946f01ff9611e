//! [`Architecture`]: a kind of decoder as data: its published sizes and its keys in Hugging Face's
//! `config.json`. [`DecoderConfig`]: a decoder of one of them.

use std::fmt;

use serde_json::Value;
use trainer::hf::HfReader;

use crate::ARCHITECTURES;
use crate::dims::Dimensions;
use crate::rope_scaling::RopeScaling;

/// Kind of decoder.
pub struct Architecture {
    /// Name in `[model] type`, and prefix of its presets.
    pub name: &'static str,
    /// `model_type` in `config.json`.
    pub model_type: &'static str,
    /// `architectures` in `config.json`.
    pub class: &'static str,
    /// Whether each head of q and k passes an RMSNorm.
    pub qk_norm: bool,
    /// Whether `q_proj`, `k_proj` and `v_proj` have biases.
    pub qkv_bias: bool,
    /// Names of its sizes. The first trains on a CPU.
    pub sizes: &'static [&'static str],
    /// Configuration of the size at this index.
    pub size: fn(usize) -> DecoderConfig,
    /// Values of keys that a `config.json` leaves out.
    pub defaults: Defaults,
    /// Reads further keys, and the scaling of the rotary frequencies.
    pub read: fn(&HfReader<'_>, Option<ScaledRope<'_>>, &mut DecoderConfig) -> anyhow::Result<()>,
    /// Further keys to write.
    pub write: fn(&DecoderConfig) -> Vec<(&'static str, Value)>,
}

/// Defaults of transformers for keys missing in the `config.json` of a kind of model.
#[derive(Clone, Copy, Debug)]
pub struct Defaults {
    /// Vocabulary size.
    pub vocab_size: usize,
    /// Width of the SwiGLU.
    pub intermediate_size: usize,
    /// Number of key and value heads; if `None`, the number of query heads.
    pub num_kv_heads: Option<usize>,
    /// Width of one head; if `None`, `hidden_size / num_attention_heads`.
    pub head_dim: Option<usize>,
    /// Maximum number of positions.
    pub max_seq_len: usize,
}

/// Scaling of rotary frequencies.
#[derive(Clone, Copy, Debug)]
pub struct ScaledRope<'a> {
    /// Key that names the kind.
    pub key: &'static str,
    /// Kind of scaling.
    pub kind: &'a str,
    /// Object with its parameters.
    pub json: HfReader<'a>,
    /// Positions before the extension: as given inside or next to the object, or
    /// `max_position_embeddings`.
    pub original_max_seq_len: usize,
}

/// Dimensions of a decoder. Create one with [`preset`](DecoderConfig::preset), from a Hugging Face
/// folder by [`read_config`](trainer::hf::read_config), or field by field.
/// [`validate`](trainer::ModelConfig::validate) is called before a model is built.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DecoderConfig {
    /// Kind of decoder.
    pub architecture: &'static Architecture,
    /// Sizes.
    pub dims: Dimensions,
    /// Frequency scaling of Llama 3.1 and later.
    pub rope_scaling: Option<RopeScaling>,
}

impl Architecture {
    /// Architecture called `name` in `[model] type`.
    ///
    /// # Errors
    /// An invalid field.
    pub fn named(name: &str) -> anyhow::Result<&'static Self> {
        ARCHITECTURES.into_iter().find(|architecture| architecture.name == name).ok_or_else(|| {
            let known = ARCHITECTURES.map(|architecture| architecture.name).join(", ");
            crate::dims::refused("type", name, format!("must be one of {known}"))
        })
    }
}

impl PartialEq for Architecture {
    fn eq(&self, other: &Self) -> bool {
        self.name == other.name
    }
}

impl fmt::Debug for Architecture {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name)
    }
}

/// Names of all presets: `debug`, which is `llama3-debug`, and each size of each architecture.
pub fn presets() -> Vec<String> {
    let sizes = ARCHITECTURES.into_iter().flat_map(|of| of.sizes.iter().map(|size| format!("{}-{size}", of.name)));
    std::iter::once("debug".to_string()).chain(sizes).collect()
}
