//! Named sizes: `debug` and `debug_moe` for a CPU, and the published dimensions of Llama 3.1 and
//! 3.2.

use anyhow::{Result, bail};
use decoder::{Dimensions, MoeConfig};
use train::ByteTokenizer;

use crate::config::{LlamaConfig, RopeScaling};

/// Names for [`LlamaConfig::preset`].
pub const PRESETS: [&str; 7] = ["debug", "debug_moe", "1b", "3b", "8b", "70b", "405b"];

impl LlamaConfig {
    /// Dimensions of the preset `name`: `debug` (byte tokens, trains on a CPU in minutes),
    /// `debug_moe` (the same as a mixture of experts), `1b` and `3b` (Llama 3.2), `8b`, `70b` and
    /// `405b` (Llama 3.1).
    ///
    /// # Errors
    /// An unknown preset.
    pub fn preset(name: &str) -> Result<Self> {
        Ok(match name {
            "debug" => debug(),
            "debug_moe" => debug_moe(),
            "1b" => llama3_2(2048, 8192, 16, 32, 64),
            "3b" => llama3_2(3072, 8192, 28, 24, 128),
            "8b" => llama3_1(4096, 14336, 32, 32),
            "70b" => llama3_1(8192, 28672, 80, 64),
            "405b" => llama3_1(16384, 53248, 126, 128),
            _ => {
                bail!("unknown model preset `{name}`; there are {}", PRESETS.join(", "));
            }
        })
    }
}

fn debug() -> LlamaConfig {
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
        moe: None,
    };
    LlamaConfig { dims, rope_scaling: None }
}

/// Uses the same number of parameters per token as [`debug`], plus the routers.
fn debug_moe() -> LlamaConfig {
    let dense = debug();
    let moe = MoeConfig { num_experts: 4, num_experts_per_tok: 2 };
    let intermediate_size = dense.dims.intermediate_size / moe.num_experts_per_tok;
    LlamaConfig { dims: Dimensions { intermediate_size, moe: Some(moe), ..dense.dims }, ..dense }
}

/// Llama 3.1: heads of 128, separate output layer.
fn llama3_1(hidden: usize, intermediate: usize, layers: usize, heads: usize) -> LlamaConfig {
    published(hidden, intermediate, layers, heads, 128, 8.0, false)
}

/// Llama 3.2: tied embeddings, frequencies scaled by four times the factor.
fn llama3_2(hidden: usize, intermediate: usize, layers: usize, heads: usize, head_dim: usize) -> LlamaConfig {
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
) -> LlamaConfig {
    let dims = Dimensions {
        vocab_size: 128_256,
        hidden_size,
        intermediate_size,
        num_layers,
        num_heads,
        num_kv_heads: 8,
        head_dim,
        rms_norm_eps: 1e-5,
        rope_theta: 500_000.0,
        max_seq_len: 131_072,
        tie_word_embeddings,
        qk_norm: false,
        moe: None,
    };
    let rope_scaling =
        RopeScaling { factor, low_freq_factor: 1.0, high_freq_factor: 4.0, original_max_position_embeddings: 8192 };
    LlamaConfig { dims, rope_scaling: Some(rope_scaling) }
}
