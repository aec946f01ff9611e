//! `LlamaConfig`: the dimensions of a Llama 3, and what may be said about them without building one.

use serde::{Deserialize, Serialize};

use crate::Error;

/// Dimensions of a Llama 3 model. Construct one from [`preset`](LlamaConfig::preset),
/// [`from_hf_dir`](LlamaConfig::from_hf_dir) or field by field; [`validate`](LlamaConfig::validate) is called
/// before a model is built.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LlamaConfig {
    /// Tokens in the vocabulary, V.
    pub vocab_size: usize,
    /// Width of the residual stream, H.
    pub hidden_size: usize,
    /// Width of the SwiGLU.
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
}

/// Llama 3.1's change of the rotary frequencies, `rope_type: llama3`: see [`rope`](crate::rope).
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
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
    /// Checks every field.
    ///
    /// # Errors
    /// [`Error::ModelConfig`] naming the first field that cannot be.
    pub fn validate(&self) -> Result<(), Error> {
        for (field, value) in [
            ("vocab_size", self.vocab_size),
            ("hidden_size", self.hidden_size),
            ("intermediate_size", self.intermediate_size),
            ("num_layers", self.num_layers),
            ("num_heads", self.num_heads),
            ("num_kv_heads", self.num_kv_heads),
            ("head_dim", self.head_dim),
            ("max_seq_len", self.max_seq_len),
        ] {
            if value == 0 {
                return Err(bad(field, value, "must be at least 1"));
            }
        }
        if !self.num_heads.is_multiple_of(self.num_kv_heads) {
            let reason = format!("must divide num_heads = {}", self.num_heads);
            return Err(bad("num_kv_heads", self.num_kv_heads, reason));
        }
        if !self.head_dim.is_multiple_of(2) {
            let reason = "must be even: RoPE rotates pairs";
            return Err(bad("head_dim", self.head_dim, reason));
        }
        positive("rms_norm_eps", self.rms_norm_eps)?;
        positive("rope_theta", self.rope_theta)?;
        self.rope_scaling.map_or(Ok(()), |scaling| scaling.validate())
    }

    /// Parameters of the model; a tied embedding counts once.
    pub fn num_params(&self) -> usize {
        let embeddings = if self.tie_word_embeddings { 1 } else { 2 };
        self.num_matmul_params() + (embeddings - 1) * self.vocab_size * self.hidden_size
    }

    /// Parameters that every token is multiplied with: all but the embedding's look-up. A tied embedding counts,
    /// as the output layer.
    pub fn num_matmul_params(&self) -> usize {
        let h = self.hidden_size;
        let q = self.num_heads * self.head_dim;
        let kv = self.num_kv_heads * self.head_dim;
        let attention = h * (q + 2 * kv) + q * h;
        let mlp = 3 * h * self.intermediate_size;
        let norms = 2 * h;
        self.num_layers * (attention + mlp + norms) + h + self.vocab_size * h
    }

    /// Floating-point operations of one training token (forward and backward) in sequences of `seq_len`:
    /// `6·N + 12·L·heads·head_dim·T` with N from [`num_matmul_params`](Self::num_matmul_params), which is the
    /// formula of torchtitan's `tflops` and `mfu` (PaLM, arXiv 2204.02311, appendix B).
    pub fn flops_per_token(&self, seq_len: usize) -> f64 {
        let attention = 12 * self.num_layers * self.num_heads * self.head_dim;
        6.0 * self.num_matmul_params() as f64 + attention as f64 * seq_len as f64
    }
}

impl RopeScaling {
    fn validate(&self) -> Result<(), Error> {
        positive("rope_scaling.factor", self.factor)?;
        positive("rope_scaling.low_freq_factor", self.low_freq_factor)?;
        positive("rope_scaling.high_freq_factor", self.high_freq_factor)?;
        if self.high_freq_factor <= self.low_freq_factor {
            let reason = format!("must exceed low_freq_factor = {}", self.low_freq_factor);
            let field = "rope_scaling.high_freq_factor";
            return Err(bad(field, self.high_freq_factor, reason));
        }
        if self.original_max_position_embeddings == 0 {
            let field = "rope_scaling.original_max_position_embeddings";
            return Err(bad(field, 0, "must be at least 1"));
        }
        Ok(())
    }
}

fn positive(field: &'static str, value: f64) -> Result<(), Error> {
    if value > 0.0 && value.is_finite() {
        return Ok(());
    }
    Err(bad(field, value, "must be positive and finite"))
}

fn bad(field: &'static str, value: impl ToString, reason: impl Into<String>) -> Error {
    Error::ModelConfig { field, value: value.to_string(), reason: reason.into() }
}
