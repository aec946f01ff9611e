//! Keys of Hugging Face's `config.json` shared by decoder-only transformers, and their tensors.
//!
//! Rotary frequencies are read in the `rope_theta` + `rope_scaling` form and the newer
//! `rope_parameters` form. They are written in the first form, which every version of transformers
//! reads. If a file has both, `rope_scaling` counts, as in transformers 5
//! (`convert_rope_params_to_dict` in `modeling_rope_utils.py`).

use anyhow::Result;
use serde_json::{Value, json};
use trainer::hf::HfReader;

use crate::architecture::{Architecture, ScaledRope};
use crate::dims::Dimensions;

/// Linears that vLLM fuses: [`ModelConfig::fused_linears`](trainer::ModelConfig::fused_linears) of
/// these models.
pub const FUSED_LINEARS: [&[&str]; 2] = [&["q_proj", "k_proj", "v_proj"], &["gate_proj", "up_proj"]];

/// Rope keys allowed for every kind.
pub const ROPE_KEYS: [&str; 4] = ["rope_type", "type", "rope_theta", "partial_rotary_factor"];

/// Reads the sizes of a dense model, and the scaling of its rotary frequencies, if any.
///
/// # Errors
/// Another activation; biases that the architecture lacks; a value of another type.
pub fn read<'a>(
    json: &HfReader<'a>,
    architecture: &Architecture,
) -> anyhow::Result<(Dimensions, Option<ScaledRope<'a>>)> {
    let defaults = &architecture.defaults;
    json.only("hidden_act", "silu", "only silu is")?;
    for key in ["attention_bias", "mlp_bias"] {
        if json.boolean(key)?.unwrap_or(false) {
            return Err(json.unsupported(key, "these linears have no bias"));
        }
    }
    let hidden_size = json.integer("hidden_size")?.unwrap_or(4096);
    let num_heads = json.integer("num_attention_heads")?.unwrap_or(32);
    let head_dim = json.integer("head_dim")?.or(defaults.head_dim);
    let num_kv_heads = match json.integer("num_key_value_heads")? {
        None if json.is_null("num_key_value_heads") => Some(num_heads),
        num_kv_heads => num_kv_heads.or(defaults.num_kv_heads),
    };
    let max_seq_len = json.integer("max_position_embeddings")?.unwrap_or(defaults.max_seq_len);
    let (rope_theta, scaled) = rope(json, max_seq_len)?;
    let dims = Dimensions {
        vocab_size: json.integer("vocab_size")?.unwrap_or(defaults.vocab_size),
        hidden_size,
        intermediate_size: json.integer("intermediate_size")?.unwrap_or(defaults.intermediate_size),
        num_layers: json.integer("num_hidden_layers")?.unwrap_or(32),
        num_heads,
        num_kv_heads: num_kv_heads.unwrap_or(num_heads),
        head_dim: head_dim.unwrap_or_else(|| hidden_size.checked_div(num_heads).unwrap_or(0)),
        rms_norm_eps: json.number("rms_norm_eps")?.unwrap_or(1e-6),
        rope_theta,
        max_seq_len,
        tie_word_embeddings: json.boolean("tie_word_embeddings")?.unwrap_or(false),
        qk_norm: architecture.qk_norm,
        qkv_bias: architecture.qkv_bias,
        moe: None,
    };
    Ok((dims, scaled))
}

/// Reads theta and the scaling. `rope_parameters` has both; the older form has `rope_theta` next to
/// `rope_scaling`. If one form counts, the other object is ignored.
fn rope<'a>(json: &HfReader<'a>, max_seq_len: usize) -> Result<(f64, Option<ScaledRope<'a>>)> {
    const DEFAULT_THETA: f64 = 10_000.0;
    let outer_theta = json.number("rope_theta")?;
    whole_heads(json)?;
    let older = json.object("rope_scaling")?.filter(|older| older.others(&[]).next().is_some());
    let inner = if older.is_some() { older } else { json.object("rope_parameters")? };
    let Some(inner) = inner else { return Ok((outer_theta.unwrap_or(DEFAULT_THETA), None)) };
    let theta = inner.number("rope_theta")?.or(outer_theta).unwrap_or(DEFAULT_THETA);
    whole_heads(&inner)?;
    // `type` is the older name of `rope_type`.
    let key = if inner.get("rope_type").is_some() { "rope_type" } else { "type" };
    let Some(kind) = inner.string(key)?.filter(|kind| *kind != "default") else {
        inner.only_keys(&ROPE_KEYS, "rope that is not scaled has no such key")?;
        return Ok((theta, None));
    };
    let original = "original_max_position_embeddings";
    let original_max_seq_len = json.integer(original)?.or(inner.integer(original)?).unwrap_or(max_seq_len);
    Ok((theta, Some(ScaledRope { key, kind, json: inner, original_max_seq_len })))
}

/// Checks `partial_rotary_factor`, which is next to `rope_theta` in either form.
fn whole_heads(json: &HfReader<'_>) -> Result<()> {
    let key = "partial_rotary_factor";
    match json.number(key)? {
        None | Some(1.0) => Ok(()),
        Some(_) => Err(json.unsupported(key, "all of a head is rotated")),
    }
}

/// Keys that describe a dense model; `rope_scaling` is null.
pub fn write(dims: &Dimensions, architecture: &Architecture) -> Vec<(&'static str, Value)> {
    let mut keys = vec![
        ("architectures", json!([architecture.class])),
        ("model_type", json!(architecture.model_type)),
        ("hidden_act", json!("silu")),
        ("vocab_size", json!(dims.vocab_size)),
        ("hidden_size", json!(dims.hidden_size)),
        ("intermediate_size", json!(dims.intermediate_size)),
        ("num_hidden_layers", json!(dims.num_layers)),
        ("num_attention_heads", json!(dims.num_heads)),
        ("num_key_value_heads", json!(dims.num_kv_heads)),
        ("head_dim", json!(dims.head_dim)),
        ("rms_norm_eps", json!(dims.rms_norm_eps)),
        ("rope_theta", json!(dims.rope_theta)),
        ("rope_scaling", Value::Null),
        ("max_position_embeddings", json!(dims.max_seq_len)),
        ("tie_word_embeddings", json!(dims.tie_word_embeddings)),
    ];
    if !dims.qkv_bias {
        keys.insert(3, ("attention_bias", json!(false)));
    }
    keys
}

impl Dimensions {
    /// Tensors of a dense model, by path in the module tree, with the shapes of Hugging Face's
    /// files.
    pub fn hf_tensors(&self) -> Vec<(String, Vec<usize>)> {
        let Self { vocab_size, hidden_size: h, intermediate_size, head_dim, .. } = *self;
        let (q, kv) = (self.num_heads * head_dim, self.num_kv_heads * head_dim);
        let mut tensors = vec![("embed_tokens.weight".to_string(), vec![vocab_size, h])];
        for layer in 0..self.num_layers {
            let mut add = |name: &str, shape| tensors.push((format!("layers.{layer}.{name}"), shape));
            add("input_layernorm.gamma", vec![h]);
            for (linear, size) in [("q_proj", q), ("k_proj", kv), ("v_proj", kv)] {
                add(&format!("self_attn.{linear}.weight"), vec![size, h]);
                if self.qkv_bias {
                    add(&format!("self_attn.{linear}.bias"), vec![size]);
                }
            }
            add("self_attn.o_proj.weight", vec![h, q]);
            if self.qk_norm {
                add("self_attn.q_norm.gamma", vec![head_dim]);
                add("self_attn.k_norm.gamma", vec![head_dim]);
            }
            add("post_attention_layernorm.gamma", vec![h]);
            add("mlp.gate_proj.weight", vec![intermediate_size, h]);
            add("mlp.up_proj.weight", vec![intermediate_size, h]);
            add("mlp.down_proj.weight", vec![h, intermediate_size]);
        }
        tensors.push(("norm.gamma".into(), vec![h]));
        if !self.tie_word_embeddings {
            tensors.push(("lm_head.weight".into(), vec![vocab_size, h]));
        }
        tensors
    }
}
