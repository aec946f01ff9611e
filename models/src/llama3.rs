//! Llama 3, 3.1 and 3.2: published sizes, `debug` and a mixture of experts for a CPU, and its keys
//! in `config.json`.

use serde_json::json;
use trainer::ByteTokenizer;

use crate::architecture::{Architecture, DecoderConfig, Defaults, ScaledRope};
use crate::dims::{Dimensions, MoeConfig};
use crate::hf::ROPE_KEYS;
use crate::rope_scaling::RopeScaling;

/// Llama 3.
pub static ARCHITECTURE: Architecture = Architecture {
    name: "llama3",
    model_type: "llama",
    class: "LlamaForCausalLM",
    qk_norm: false,
    qkv_bias: false,
    sizes: &["debug", "debug-moe", "1b", "3b", "8b", "70b", "405b"],
    size: |index| match index {
        0 => debug(),
        1 => debug_moe(),
        2 => llama3_2(2048, 8192, 16, 32, 64),
        3 => llama3_2(3072, 8192, 28, 24, 128),
        4 => llama3_1(4096, 14336, 32, 32),
        5 => llama3_1(8192, 28672, 80, 64),
        _ => llama3_1(16384, 53248, 126, 128),
    },
    defaults: Defaults {
        vocab_size: 32_000,
        intermediate_size: 11_008,
        num_kv_heads: None,
        head_dim: None,
        max_seq_len: 2048,
    },
    read: |_, scaled, config| {
        config.rope_scaling = scaled.map(scaling).transpose()?;
        Ok(())
    },
    write: |config| {
        let scaling = config.rope_scaling.map(|scaling| {
            let rope_scaling = json!({
                "rope_type": "llama3",
                "factor": scaling.factor,
                "low_freq_factor": scaling.low_freq_factor,
                "high_freq_factor": scaling.high_freq_factor,
                "original_max_position_embeddings": scaling.original_max_position_embeddings,
            });
            ("rope_scaling", rope_scaling)
        });
        std::iter::once(("mlp_bias", json!(false))).chain(scaling).collect()
    },
};

/// Llama 3.1's scaling of rotary frequencies.
fn scaling(rope: ScaledRope<'_>) -> anyhow::Result<RopeScaling> {
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

fn debug() -> DecoderConfig {
    let dims = Dimensions {
        vocab_size: ByteTokenizer::PADDED_VOCAB_SIZE,
        hidden_size: 128,
        intermediate_size: 384,
        num_layers: 4,
        num_heads: 4,
        num_kv_heads: 2,
        head_dim: 32,
        rms_norm_eps: 1e-5,
        rope_theta: 10_000.0,
        max_seq_len: 1024,
        tie_word_embeddings: false,
        qk_norm: false,
        qkv_bias: false,
        moe: None,
    };
    DecoderConfig { architecture: &ARCHITECTURE, dims, rope_scaling: None }
}

/// Uses the same number of parameters per token as [`debug`], plus the routers.
fn debug_moe() -> DecoderConfig {
    let dense = debug();
    let moe = MoeConfig { num_experts: 4, num_experts_per_tok: 2 };
    let intermediate_size = dense.dims.intermediate_size / moe.num_experts_per_tok;
    DecoderConfig { dims: Dimensions { intermediate_size, moe: Some(moe), ..dense.dims }, ..dense }
}

/// Llama 3.1: heads of 128, separate output layer.
fn llama3_1(hidden: usize, intermediate: usize, layers: usize, heads: usize) -> DecoderConfig {
    published(hidden, intermediate, layers, heads, 128, 8.0, false)
}

/// Llama 3.2: tied embeddings, frequencies scaled by four times the factor.
fn llama3_2(hidden: usize, intermediate: usize, layers: usize, heads: usize, head_dim: usize) -> DecoderConfig {
    published(hidden, intermediate, layers, heads, head_dim, 32.0, true)
}

fn published(
    hidden_size: usize,
    intermediate_size: usize,
    num_layers: usize,
    num_heads: usize,
    head_dim: usize,
    factor: f64,
    tie_word_embeddings: bool,
) -> DecoderConfig {
    let dims = Dimensions {
        vocab_size: 128_256,
        hidden_size,
        intermediate_size,
        num_layers,
        num_heads,
        num_kv_heads: 8,
        head_dim,
        rope_theta: 500_000.0,
        max_seq_len: 131_072,
        tie_word_embeddings,
        ..debug().dims
    };
    let rope_scaling =
        RopeScaling { factor, low_freq_factor: 1.0, high_freq_factor: 4.0, original_max_position_embeddings: 8192 };
    DecoderConfig { dims, rope_scaling: Some(rope_scaling), ..debug() }
}
