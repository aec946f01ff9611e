//! [`Dimensions`]: sizes of a decoder-only transformer, and counts derived from them.

use trainer::{MAX_TENSOR_BITS, ModelSize, elements};

use crate::rope::MAX_AHEAD;

/// Sizes of a decoder-only transformer with grouped-query attention and, in each layer, a SwiGLU or
/// a mixture of experts.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Dimensions {
    /// Vocabulary size, V.
    pub vocab_size: usize,
    /// Width of the residual stream, H.
    pub hidden_size: usize,
    /// Width of the SwiGLU, or of each expert's.
    pub intermediate_size: usize,
    /// Number of decoder layers.
    pub num_layers: usize,
    /// Number of query heads.
    pub num_heads: usize,
    /// Number of key and value heads; each serves `num_heads / num_kv_heads` query heads.
    pub num_kv_heads: usize,
    /// Width of one head; even. May differ from `hidden_size / num_heads`.
    pub head_dim: usize,
    /// Added to the mean square in RMSNorm.
    pub rms_norm_eps: f64,
    /// Base of the rotary frequencies.
    pub rope_theta: f64,
    /// Number of positions with precomputed rotary tables. Longer sequences compute theirs on the
    /// fly.
    pub max_seq_len: usize,
    /// Whether the output layer is the transposed embedding.
    pub tie_word_embeddings: bool,
    /// Whether each head of queries and keys passes an RMSNorm before rotation.
    pub qk_norm: bool,
    /// Whether the linears of queries, keys and values have biases.
    pub qkv_bias: bool,
    /// Mixture of experts that replaces each SwiGLU; `None` in a dense model.
    pub moe: Option<MoeConfig>,
}

/// Mixture of experts that replaces each SwiGLU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MoeConfig {
    /// Number of experts in each layer.
    pub num_experts: usize,
    /// Number of experts per token.
    pub num_experts_per_tok: usize,
}

impl MoeConfig {
    fn validate(&self) -> anyhow::Result<()> {
        let Self { num_experts, num_experts_per_tok } = *self;
        if num_experts == 0 {
            return Err(refused("moe.num_experts", num_experts, "must be at least 1"));
        }
        if !(1..=num_experts).contains(&num_experts_per_tok) {
            let reason = format!("must be from 1 to num_experts = {num_experts}");
            return Err(refused("moe.num_experts_per_tok", num_experts_per_tok, reason));
        }
        Ok(())
    }
}

/// log2 of the maximum number of elements of the rotary table, which the host computes.
const MAX_AHEAD_BITS: u32 = 28;
/// Maximum number of parameters, ten times the largest Llama 3.
const MAX_PARAMS: u128 = 1 << 42;
/// Maximum number of layers.
const MAX_LAYERS: usize = 10_000;

impl Dimensions {
    /// Checks every field and the size of the model: no tensor of more than 2^40 elements, and at
    /// most 2^42 parameters in 10 000 layers.
    ///
    /// # Errors
    /// The first invalid field, by name.
    pub fn validate(&self) -> anyhow::Result<()> {
        self.moe.map_or(Ok(()), |moe| moe.validate())?;
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
                return Err(refused(field, value, "must be at least 1"));
            }
        }
        if !self.num_heads.is_multiple_of(self.num_kv_heads) {
            let reason = format!("must divide num_heads = {}", self.num_heads);
            return Err(refused("num_kv_heads", self.num_kv_heads, reason));
        }
        if !self.head_dim.is_multiple_of(2) {
            let reason = "must be even: RoPE rotates pairs";
            return Err(refused("head_dim", self.head_dim, reason));
        }
        self.validate_size()?;
        positive("rms_norm_eps", self.rms_norm_eps)?;
        positive("rope_theta", self.rope_theta)
    }

    /// Ensures that later products do not overflow. `num_kv_heads` divides `num_heads`, so k and v
    /// are no larger than q.
    fn validate_size(&self) -> anyhow::Result<()> {
        let vocab = ("vocab_size", self.vocab_size);
        let hidden = ("hidden_size", self.hidden_size);
        let intermediate = ("intermediate_size", self.intermediate_size);
        let heads = ("num_heads", self.num_heads);
        let head_dim = ("head_dim", self.head_dim);
        let positions = ("max_seq_len", self.max_seq_len);
        let experts = self.moe.map(|moe| ("moe.num_experts", moe.num_experts));
        let gate: Vec<_> = experts.into_iter().chain([hidden, intermediate]).collect();
        let ahead = ("max_seq_len", self.max_seq_len.min(MAX_AHEAD));
        for (tensor, factors, bits) in [
            ("the embedding", &[vocab, hidden][..], MAX_TENSOR_BITS),
            ("gate_proj", &gate, MAX_TENSOR_BITS),
            ("q_proj", &[hidden, heads, head_dim], MAX_TENSOR_BITS),
            ("the rotary table", &[positions, head_dim], MAX_TENSOR_BITS),
            ("the rotary table of the first positions", &[ahead, head_dim], MAX_AHEAD_BITS),
        ] {
            if elements(factors.iter().map(|&(_, size)| size), bits).is_none() {
                let &(field, value) = factors.iter().max_by_key(|(_, size)| size).unwrap_or(&hidden);
                let sizes: Vec<_> = factors.iter().map(|(_, size)| size.to_string()).collect();
                let reason = format!("{tensor} would have {} elements, more than 2^{bits}", sizes.join(" · "));
                return Err(refused(field, value, reason));
            }
        }
        if self.num_layers > MAX_LAYERS {
            return Err(refused("num_layers", self.num_layers, format!("must be at most {MAX_LAYERS}")));
        }
        // At most 9 · 2^40 per layer: no overflow in 128 bits.
        let params = self.count_params();
        if params > MAX_PARAMS.min(usize::MAX as u128) {
            let embedding = self.vocab_size as u128 * self.hidden_size as u128;
            let (field, value) = if params > 4 * embedding { ("num_layers", self.num_layers) } else { vocab };
            return Err(refused(field, value, format!("the model would have {params} parameters, more than 2^42")));
        }
        Ok(())
    }

    /// Number of parameters; a tied embedding counts once. Exact after
    /// [`validate`](Self::validate).
    pub fn num_params(&self) -> usize {
        self.count_params() as usize
    }

    fn count_params(&self) -> u128 {
        let experts = self.moe.map_or(1, |moe| moe.num_experts);
        self.count_matmul_params(experts).saturating_add(self.count_look_up())
    }

    /// Number of parameters used per token; in a mixture only the token's experts count. Exact
    /// after [`validate`](Self::validate).
    pub fn num_active_params(&self) -> usize {
        self.num_matmul_params().saturating_add(self.count_look_up() as usize)
    }

    /// Parameters of the embedding look-up; 0 if the embedding is the output layer.
    fn count_look_up(&self) -> u128 {
        if self.tie_word_embeddings { 0 } else { self.vocab_size as u128 * self.hidden_size as u128 }
    }

    /// Number of parameters in a token's matmuls: all used parameters except the embedding look-up.
    /// A tied embedding counts, as the output layer. Exact after [`validate`](Self::validate).
    pub fn num_matmul_params(&self) -> usize {
        self.count_matmul_params(self.moe.map_or(1, |moe| moe.num_experts_per_tok)) as usize
    }

    /// Count with this number of SwiGLUs per layer.
    fn count_matmul_params(&self, experts: usize) -> u128 {
        let wide = |size: usize| size as u128;
        let h = wide(self.hidden_size);
        // h (2 q + 2 kv) for attention, 3 h · intermediate for a SwiGLU, h · experts for the
        // router, 2 h for the norms.
        let heads = wide(self.num_heads).saturating_add(wide(self.num_kv_heads));
        let attention = heads.saturating_mul(wide(self.head_dim)).saturating_mul(2);
        let router = self.moe.map_or(0, |moe| wide(moe.num_experts));
        let mlp = (3 * wide(self.intermediate_size)).saturating_mul(wide(experts)).saturating_add(router);
        let per_row = attention.saturating_add(mlp).saturating_add(2);
        let head_norms = if self.qk_norm { 2 * wide(self.head_dim) } else { 0 };
        let biases = if self.qkv_bias { wide(self.num_heads + 2 * self.num_kv_heads) * wide(self.head_dim) } else { 0 };
        let layers = wide(self.num_layers);
        let outside = h.saturating_mul(1 + wide(self.vocab_size));
        h.saturating_mul(per_row.saturating_mul(layers))
            .saturating_add((head_norms + biases) * layers)
            .saturating_add(outside)
    }

    /// Floating-point operations per training token (forward and backward) in sequences of
    /// `seq_len`: `6·N + 12·L·heads·head_dim·T` with N from
    /// [`num_matmul_params`](Self::num_matmul_params). This is torchtitan's formula for `tflops`
    /// and `mfu` (PaLM, arXiv 2204.02311, appendix B).
    pub fn flops_per_token(&self, seq_len: usize) -> f64 {
        let sizes = [12, self.num_layers, self.num_heads, self.head_dim, seq_len];
        let attention: f64 = sizes.iter().map(|&size| size as f64).product();
        6.0 * self.num_matmul_params() as f64 + attention
    }

    /// Size of the model.
    pub fn size(&self) -> ModelSize {
        ModelSize {
            vocab_size: self.vocab_size,
            hidden_size: self.hidden_size,
            num_layers: self.num_layers,
            max_seq_len: self.max_seq_len,
            tie_word_embeddings: self.tie_word_embeddings,
            num_params: self.num_params(),
            num_active_params: self.num_active_params(),
            has_experts: self.moe.is_some(),
        }
    }
}

/// Returns an error unless a field is positive and finite.
///
/// # Errors
/// An invalid field.
pub(crate) fn positive(field: &'static str, value: f64) -> anyhow::Result<()> {
    if value > 0.0 && value.is_finite() {
        return Ok(());
    }
    Err(refused(field, value, "must be positive and finite"))
}

/// Error for an invalid field.
pub(crate) fn refused(field: &'static str, value: impl ToString, reason: impl Into<String>) -> anyhow::Error {
    anyhow::anyhow!("model config: {field} = {}: {}", value.to_string(), reason.into())
}
