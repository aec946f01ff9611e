//! Mistral 7B from version 0.2 on, whose sliding window is null.

use serde_json::Value;

use crate::architecture::{Architecture, DecoderConfig, Defaults};
use crate::dims::Dimensions;
use crate::qwen3;

/// Mistral: a Llama without biases and without scaled frequencies.
pub static ARCHITECTURE: Architecture = Architecture {
    name: "mistral",
    model_type: "mistral",
    class: "MistralForCausalLM",
    qk_norm: false,
    qkv_bias: false,
    sizes: &["debug", "7b"],
    size: |index| if index == 0 { qwen3::debug(sized(128, 384, 4, 4)) } else { sized(4096, 14_336, 32, 32) },
    defaults: Defaults {
        vocab_size: 32_000,
        intermediate_size: 14_336,
        num_kv_heads: Some(8),
        head_dim: None,
        max_seq_len: 131_072,
    },
    read: |json, scaled, config| {
        // transformers takes 4096 if the key is missing.
        if !json.is_null("sliding_window") {
            return Err(json.unsupported("sliding_window", "only null is: every layer attends to all positions"));
        }
        qwen3::read(json, scaled, config)
    },
    write: |_| vec![("sliding_window", Value::Null)],
};

/// Sizes as version 0.3 has them.
fn sized(hidden_size: usize, intermediate_size: usize, num_layers: usize, num_heads: usize) -> DecoderConfig {
    let dims = Dimensions {
        vocab_size: 32_768,
        hidden_size,
        intermediate_size,
        num_layers,
        num_heads,
        num_kv_heads: 8,
        head_dim: 128,
        rms_norm_eps: 1e-5,
        rope_theta: 1_000_000.0,
        max_seq_len: 32_768,
        tie_word_embeddings: false,
        qk_norm: false,
        qkv_bias: false,
        moe: None,
    };
    DecoderConfig { architecture: &ARCHITECTURE, dims, rope_scaling: None }
}
