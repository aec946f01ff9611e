//! [`tensor_plan`]: tensor parallelism of a decoder.

use float8_shard::{ParallelPlan, TensorStyle};

use crate::dims::Dimensions;

/// Plan of a dense decoder. q, k, v, gate, up and the output layer are divided by columns, o and down
/// by rows, and the embedding by its vocabulary. Norms of hidden states read a rank's tokens, norms of
/// heads a rank's heads.
///
/// The number of ranks divides the key heads.
pub fn tensor_plan(dims: &Dimensions) -> ParallelPlan {
    use TensorStyle::{Colwise, Rowwise, Sequence};
    let mut plan = vec![
        ("embed_tokens", Rowwise),
        ("layers.*.*_layernorm", Sequence),
        ("layers.*.self_attn.[qkv]_proj", Colwise),
        ("layers.*.self_attn.o_proj", Rowwise),
        ("layers.*.mlp.gate_proj", Colwise),
        ("layers.*.mlp.up_proj", Colwise),
        ("layers.*.mlp.down_proj", Rowwise),
        ("norm", Sequence),
    ];
    if dims.qk_norm {
        plan.push(("layers.*.self_attn.[qk]_norm", Sequence));
    }
    if !dims.tie_word_embeddings {
        plan.push(("lm_head", Colwise));
    }
    plan.into_iter().map(|(name, style)| (name.into(), style)).collect()
}
