//! Qwen3, dense: published sizes, `debug` for a CPU, and its keys in `config.json`.

use serde_json::{Value, json};
use trainer::ByteTokenizer;
use trainer::hf::HfReader;

use crate::architecture::{Architecture, DecoderConfig, Defaults, ScaledRope};
use crate::dims::Dimensions;

/// Qwen3.
pub static ARCHITECTURE: Architecture = Architecture {
    name: "qwen3",
    model_type: "qwen3",
    class: "Qwen3ForCausalLM",
    qk_norm: true,
    qkv_bias: false,
    sizes: &["debug", "0.6b", "1.7b", "4b", "8b", "14b", "32b"],
    size: |index| match index {
        0 => debug(published(128, 384, 4, 4, true)),
        1 => published(1024, 3072, 28, 16, true),
        2 => published(2048, 6144, 28, 16, true),
        3 => published(2560, 9728, 36, 32, true),
        4 => published(4096, 12_288, 36, 32, false),
        5 => published(5120, 17_408, 40, 40, false),
        _ => published(5120, 25_600, 64, 64, false),
    },
    defaults: Defaults {
        vocab_size: 151_936,
        intermediate_size: 22_016,
        num_kv_heads: Some(32),
        head_dim: Some(128),
        max_seq_len: 32_768,
    },
    read,
    write,
};

/// Refuses scaled rotary frequencies and layers that do not attend to all positions.
pub fn read(json: &HfReader<'_>, scaled: Option<ScaledRope<'_>>, _: &mut DecoderConfig) -> anyhow::Result<()> {
    if let Some(rope) = scaled {
        return Err(rope.json.unsupported(rope.key, "only default is"));
    }
    if json.boolean("use_sliding_window")?.unwrap_or(false) {
        return Err(json.unsupported("use_sliding_window", "every layer attends to all positions"));
    }
    let is_full =
        |layers: &Value| layers.as_array().is_some_and(|all| all.iter().all(|layer| layer == "full_attention"));
    match json.get("layer_types") {
        Some(layers) if !is_full(layers) => Err(json.unsupported("layer_types", "only full_attention is")),
        _ => Ok(()),
    }
}

/// Keys of layers that attend to all positions.
pub fn write(config: &DecoderConfig) -> Vec<(&'static str, Value)> {
    let layers = json!(vec!["full_attention"; config.dims.num_layers]);
    vec![("use_sliding_window", json!(false)), ("sliding_window", Value::Null), ("layer_types", layers)]
}

/// `like` with byte tokens, narrow heads and few positions.
pub fn debug(like: DecoderConfig) -> DecoderConfig {
    let dims = Dimensions {
        vocab_size: ByteTokenizer::PADDED_VOCAB_SIZE,
        head_dim: 32,
        num_kv_heads: 2,
        rope_theta: 10_000.0,
        max_seq_len: 1024,
        ..like.dims
    };
    DecoderConfig { dims, ..like }
}

fn published(hidden: usize, intermediate: usize, layers: usize, heads: usize, tied: bool) -> DecoderConfig {
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
        qkv_bias: false,
        moe: None,
    };
    DecoderConfig { architecture: &ARCHITECTURE, dims, rope_scaling: None }
}
