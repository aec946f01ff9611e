//! `LlamaConfig`: dimensions of a Llama 3.

use anyhow::Result;
use decoder::{Dimensions, positive, refused};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Dimensions of a Llama 3 model. Create one with [`preset`](LlamaConfig::preset), from a Hugging
/// Face folder by [`read_config`](train::hf::read_config), or field by field.
/// [`validate`](train::ModelConfig::validate) is called before a model is built.
#[derive(Clone, Debug, PartialEq)]
pub struct LlamaConfig {
    /// Sizes. `qk_norm` is always false.
    pub dims: Dimensions,
    /// Frequency scaling of Llama 3.1 and later.
    pub rope_scaling: Option<RopeScaling>,
}

/// Llama 3.1's scaling of the rotary frequencies, `rope_type: llama3` in Hugging Face's
/// `config.json`. The module [`rope`](crate::rope) has the equations.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct RopeScaling {
    /// Divisor of slow frequencies.
    pub factor: f64,
    /// Wavelengths above `original_max_position_embeddings / low_freq_factor` are slow.
    pub low_freq_factor: f64,
    /// Wavelengths below `original_max_position_embeddings / high_freq_factor` are unchanged.
    pub high_freq_factor: f64,
    /// Context length before the extension.
    pub original_max_position_embeddings: usize,
}

impl RopeScaling {
    pub(crate) fn validate(&self) -> Result<()> {
        positive("rope_scaling.factor", self.factor)?;
        positive("rope_scaling.low_freq_factor", self.low_freq_factor)?;
        positive("rope_scaling.high_freq_factor", self.high_freq_factor)?;
        if self.high_freq_factor <= self.low_freq_factor {
            let reason = format!("must exceed low_freq_factor = {}", self.low_freq_factor);
            let field = "rope_scaling.high_freq_factor";
            return Err(refused(field, self.high_freq_factor, reason));
        }
        if self.original_max_position_embeddings == 0 {
            let field = "rope_scaling.original_max_position_embeddings";
            return Err(refused(field, 0, "must be at least 1"));
        }
        Ok(())
    }
}
