//! Qwen2 and Qwen2.5, dense: published sizes, `debug` for a CPU, and its keys in `config.json`.

use crate::architecture::{Architecture, DecoderConfig, Defaults};
use crate::dims::Dimensions;
use crate::qwen3;

/// Qwen2: biases of q, k and v, and no norms of heads.
pub static ARCHITECTURE: Architecture = Architecture {
    name: "qwen2",
    model_type: "qwen2",
    class: "Qwen2ForCausalLM",
    qk_norm: false,
    qkv_bias: true,
    sizes: &["debug", "0.5b", "1.5b", "7b"],
    size: |index| match index {
        0 => qwen3::debug(published(128, 384, 4, [4, 2], true)),
        1 => published(896, 4864, 24, [14, 2], true),
        2 => published(1536, 8960, 28, [12, 2], true),
        _ => published(3584, 18_944, 28, [28, 4], false),
    },
    defaults: Defaults {
        vocab_size: 151_936,
        intermediate_size: 22_016,
        num_kv_heads: Some(32),
        head_dim: None,
        max_seq_len: 32_768,
    },
    read: qwen3::read,
    write: qwen3::write,
};

/// Sizes of Qwen2.5. `heads`: queries, then keys and values.
fn published(
    hidden_size: usize,
    intermediate_size: usize,
    num_layers: usize,
    heads: [usize; 2],
    tie_word_embeddings: bool,
) -> DecoderConfig {
    let [num_heads, num_kv_heads] = heads;
    let dims = Dimensions {
        vocab_size: if hidden_size < 3584 { 151_936 } else { 152_064 },
        hidden_size,
        intermediate_size,
        num_layers,
        num_heads,
        num_kv_heads,
        head_dim: hidden_size / num_heads,
        rms_norm_eps: 1e-6,
        rope_theta: 1_000_000.0,
        max_seq_len: 32_768,
        tie_word_embeddings,
        qk_norm: false,
        qkv_bias: true,
        moe: None,
    };
    DecoderConfig { architecture: &ARCHITECTURE, dims, rope_scaling: None }
}
