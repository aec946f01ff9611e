//! [`Architecture`]: a kind of decoder as data: its published sizes and its keys in Hugging Face's
//! `config.json`.

use std::fmt;

use serde_json::Value;
use trainer::hf::HfReader;

use crate::ARCHITECTURES;
use crate::config::DecoderConfig;
use crate::hf::{Defaults, ScaledRope};

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
