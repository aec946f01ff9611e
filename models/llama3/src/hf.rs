//! [`ModelConfig`] for [`LlamaConfig`]: checks, sizes, and Hugging Face's `config.json`.

use std::path::Path;

use anyhow::{Result, bail};
use decoder::hf::{Defaults, FUSED_LINEARS, ROPE_KEYS, ScaledRope};
use decoder::{Dimensions, MoeConfig};
use serde_json::{Value, json};
use train::hf::HfReader;
use train::{BatchShape, LayerBytes, ModelConfig, ModelSize};

use crate::config::{LlamaConfig, RopeScaling};

/// Defaults of transformers for missing keys.
const DEFAULTS: Defaults =
    Defaults { vocab_size: 32_000, intermediate_size: 11_008, num_kv_heads: None, head_dim: None, max_seq_len: 2048 };

impl ModelConfig for LlamaConfig {
    /// Checks every field and the size of the model, see [`Dimensions::validate`].
    fn validate(&self) -> Result<()> {
        self.dims.validate()?;
        self.rope_scaling.map_or(Ok(()), |scaling| scaling.validate())
    }

    fn size(&self) -> ModelSize {
        self.dims.size()
    }

    fn layer_bytes(&self, shape: &BatchShape) -> LayerBytes {
        self.dims.layer_bytes(shape)
    }

    fn with_max_seq_len(self, max_seq_len: usize) -> Self {
        Self { dims: Dimensions { max_seq_len, ..self.dims }, ..self }
    }

    fn with_tie_word_embeddings(self, tie_word_embeddings: bool) -> Self {
        Self { dims: Dimensions { tie_word_embeddings, ..self.dims }, ..self }
    }

    /// Output layer and routers: they choose by small differences that FP8 may lose, and are cheap.
    /// A tied output layer is not a linear of the model and needs no filter.
    fn high_precision_linears(&self) -> Vec<&'static str> {
        let names = [(!self.dims.tie_word_embeddings, "lm_head"), (self.dims.moe.is_some(), "moe.router")];
        names.into_iter().filter(|(exists, _)| *exists).map(|(_, name)| name).collect()
    }

    fn fused_linears(&self) -> Vec<&'static [&'static str]> {
        FUSED_LINEARS.to_vec()
    }

    fn from_hf(json: &HfReader<'_>) -> Result<Self> {
        let (dims, scaled) = decoder::hf::read(json, "llama", &DEFAULTS)?;
        Ok(Self { dims, rope_scaling: scaled.map(scaling).transpose()? })
    }

    fn to_hf(&self) -> Result<Vec<(&'static str, Value)>> {
        if let Some(moe) = self.dims.moe {
            bail!("only dense models are exported: this one has {} experts in a layer", moe.num_experts);
        }
        let mut keys = decoder::hf::write(&self.dims, "llama", "LlamaForCausalLM");
        keys.push(("mlp_bias", json!(false)));
        if let Some(scaling) = self.rope_scaling {
            let rope_scaling = json!({
                "rope_type": "llama3",
                "factor": scaling.factor,
                "low_freq_factor": scaling.low_freq_factor,
                "high_freq_factor": scaling.high_freq_factor,
                "original_max_position_embeddings": scaling.original_max_position_embeddings,
            });
            keys.push(("rope_scaling", rope_scaling));
        }
        Ok(keys)
    }

    fn hf_tensors(&self, path: &Path) -> Result<Vec<(String, Vec<usize>)>> {
        match self.dims.moe {
            Some(MoeConfig { num_experts, .. }) => bail!(
                "{}: checkpoints are read into dense models only; this one has {num_experts} experts in a layer",
                path.display()
            ),
            None => Ok(self.dims.hf_tensors()),
        }
    }
}

/// Llama 3.1's scaling of rotary frequencies.
fn scaling(rope: ScaledRope<'_>) -> Result<RopeScaling> {
    let ScaledRope { key, kind, json, original_max_seq_len } = rope;
    if kind != "llama3" {
        return Err(json.unsupported(key, "default and llama3 are"));
    }
    let own = ["factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"];
    json.only_keys(&[&ROPE_KEYS[..], &own].concat(), "llama3 has no such key")?;
    let number = |key| json.number(key)?.ok_or_else(|| json.missing(key));
    Ok(RopeScaling {
        factor: number("factor")?,
        low_freq_factor: number("low_freq_factor")?,
        high_freq_factor: number("high_freq_factor")?,
        original_max_position_embeddings: original_max_seq_len,
    })
}
