//! `LlamaConfig`: the dimensions of a Llama 3, and what may be said about them without building one.

use decoder::{Dimensions, positive, refused};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use train::JobError;

/// Dimensions of a Llama 3 model. Construct one from [`preset`](LlamaConfig::preset), from a Hugging Face folder by
/// [`read_config`](train::hf::read_config) or field by field; [`validate`](train::ModelConfig::validate) is called before a model is built.
#[derive(Clone, Debug, PartialEq)]
pub struct LlamaConfig {
    /// Tokens in the vocabulary, V.
    pub vocab_size: usize,
    /// Width of the residual stream, H.
    pub hidden_size: usize,
    /// Width of the SwiGLU, or of that of one expert.
    pub intermediate_size: usize,
    /// Decoder layers.
    pub num_layers: usize,
    /// Query heads.
    pub num_heads: usize,
    /// Key and value heads; each serves `num_heads / num_kv_heads` query heads.
    pub num_kv_heads: usize,
    /// Width of one head; even. Need not be `hidden_size / num_heads`.
    pub head_dim: usize,
    /// Added to the mean square in RMSNorm.
    pub rms_norm_eps: f64,
    /// Base of the rotary frequencies.
    pub rope_theta: f64,
    /// Frequency scaling of Llama 3.1 and later.
    pub rope_scaling: Option<RopeScaling>,
    /// Positions for which the rotary tables are built ahead; longer sequences work and build theirs on the fly.
    pub max_seq_len: usize,
    /// The output layer is the transposed embedding.
    pub tie_word_embeddings: bool,
    /// A mixture of experts in place of each SwiGLU.
    pub moe: Option<MoeConfig>,
}

/// A mixture of experts in place of each SwiGLU; the module [`moe`](crate::moe) has the equations.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct MoeConfig {
    /// Experts in each layer.
    pub num_experts: usize,
    /// Experts that each token is sent to.
    pub num_experts_per_tok: usize,
}

/// Llama 3.1's change of the rotary frequencies, `rope_type: llama3` in Hugging Face's `config.json`; the module [`rope`](crate::rope) has
/// the equations.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct RopeScaling {
    /// Slow frequencies are divided by this.
    pub factor: f64,
    /// Wavelengths above `original_max_position_embeddings / low_freq_factor` are slow.
    pub low_freq_factor: f64,
    /// Wavelengths below `original_max_position_embeddings / high_freq_factor` are left alone.
    pub high_freq_factor: f64,
    /// Context length before the extension.
    pub original_max_position_embeddings: usize,
}

impl LlamaConfig {
    /// The sizes, without what is Llama's own.
    pub fn dims(&self) -> Dimensions {
        Dimensions {
            vocab_size: self.vocab_size,
            hidden_size: self.hidden_size,
            intermediate_size: self.intermediate_size,
            num_layers: self.num_layers,
            num_heads: self.num_heads,
            num_kv_heads: self.num_kv_heads,
            head_dim: self.head_dim,
            rms_norm_eps: self.rms_norm_eps,
            rope_theta: self.rope_theta,
            max_seq_len: self.max_seq_len,
            tie_word_embeddings: self.tie_word_embeddings,
            qk_norm: false,
            experts: self.moe.map(|moe| [moe.num_experts, moe.num_experts_per_tok]),
        }
    }
}

impl MoeConfig {
    pub(crate) fn validate(&self) -> Result<(), JobError> {
        let Self { num_experts, num_experts_per_tok } = *self;
        if num_experts == 0 {
            return Err(refused("moe.num_experts", num_experts, "must be at least 1"));
        }
        if !(1..=num_experts).contains(&num_experts_per_tok) {
            let reason = format!("must be from 1 to num_experts = {num_experts}");
            return Err(refused("moe.num_experts_per_tok", num_experts_per_tok, reason));
        }
        Ok(())
    }
}

impl RopeScaling {
    pub(crate) fn validate(&self) -> Result<(), JobError> {
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
