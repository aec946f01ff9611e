//! Llama's part of Hugging Face's `config.json`: Llama 3.1's scaling of rotary frequencies.

use decoder::hf::{Defaults, ScaledRope};
use serde_json::{Value, json};
use train::JobError;
use train::hf::HfReader;

use crate::config::{LlamaConfig, RopeScaling};

const DEFAULTS: Defaults =
    Defaults { vocab_size: 32_000, intermediate_size: 11_008, num_kv_heads: None, head_dim: None, max_seq_len: 2048 };

/// What a `config.json` says, not yet validated.
pub(crate) fn read(json: &HfReader<'_>) -> Result<LlamaConfig, JobError> {
    let (dims, scaled) = decoder::hf::read(json, "llama", &DEFAULTS)?;
    Ok(LlamaConfig {
        vocab_size: dims.vocab_size,
        hidden_size: dims.hidden_size,
        intermediate_size: dims.intermediate_size,
        num_layers: dims.num_layers,
        num_heads: dims.num_heads,
        num_kv_heads: dims.num_kv_heads,
        head_dim: dims.head_dim,
        rms_norm_eps: dims.rms_norm_eps,
        rope_theta: dims.rope_theta,
        rope_scaling: scaled.map(scaling).transpose()?,
        max_seq_len: dims.max_seq_len,
        tie_word_embeddings: dims.tie_word_embeddings,
        moe: None,
    })
}

fn scaling(rope: ScaledRope<'_>) -> Result<RopeScaling, JobError> {
    let ScaledRope { key, kind, json } = rope;
    if kind != "llama3" {
        return Err(json.unsupported(key, "default and llama3 are"));
    }
    let number = |key| json.number(key)?.ok_or_else(|| json.missing(key));
    let length = "original_max_position_embeddings";
    Ok(RopeScaling {
        factor: number("factor")?,
        low_freq_factor: number("low_freq_factor")?,
        high_freq_factor: number("high_freq_factor")?,
        original_max_position_embeddings: json.integer(length)?.ok_or_else(|| json.missing(length))?,
    })
}

/// The keys of `config.json` that say what the model is.
pub(crate) fn write(config: &LlamaConfig) -> Result<Vec<(&'static str, Value)>, JobError> {
    if let Some(moe) = config.moe {
        return Err(JobError::MoeExport { num_experts: moe.num_experts });
    }
    let mut keys = decoder::hf::write(&config.dims(), "llama", "LlamaForCausalLM");
    keys.push(("mlp_bias", json!(false)));
    if let Some(scaling) = config.rope_scaling {
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
