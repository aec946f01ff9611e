//! Grouped-query causal attention.
//!
//! ```text
//! q = rope(x Wq)      k = rope(x Wk)      v = x Wv
//! y = softmax(q kᵀ / √head_dim + causal mask) v Wo            softmax in f32
//! ```
//! In some models, each head of q and k passes an RMSNorm before rope.

use burn::module::Module;
use burn::nn::{Linear, RmsNorm};
use burn::tensor::backend::Backend;
use burn::tensor::ops::AttentionModuleOptions;
use burn::tensor::{Bool, Int, Tensor};
use burn_float8::nn::attention;

use crate::cache::LayerCache;
use crate::dims::Dimensions;
use crate::linear::{linear, with_bias};
use crate::norm::{norm, rms_norm};
use crate::rope::RotaryTables;

/// Self-attention of one decoder layer.
#[derive(Module, Debug)]
pub struct Attention<B: Backend> {
    /// `[H, heads · head_dim]`.
    pub q_proj: Linear<B>,
    /// `[H, kv_heads · head_dim]`.
    pub k_proj: Linear<B>,
    /// `[H, kv_heads · head_dim]`.
    pub v_proj: Linear<B>,
    /// `[heads · head_dim, H]`.
    pub o_proj: Linear<B>,
    /// RMSNorm of `head_dim` elements, shared by all query heads; `None` in most architectures.
    pub q_norm: Option<RmsNorm<B>>,
    /// RMSNorm of `head_dim` elements, shared by all key heads; `None` in most architectures.
    pub k_norm: Option<RmsNorm<B>>,
    head_dim: usize,
}

/// Positions and masks shared by all layers of a forward pass.
#[derive(Clone, Debug)]
pub struct Positions<B: Backend> {
    /// Number of sequences.
    pub batch: usize,
    /// New tokens per sequence, T.
    pub len: usize,
    /// Number of positions before the new ones.
    pub past: usize,
    /// cos and sin of the new positions: of T, or of `B·T` if `hidden` is set.
    pub rope: RotaryTables<B>,
    /// Masked positions, `[B, past + T]`: padding before shorter sequences of a batch.
    pub hidden: Option<Tensor<B, 2, Bool>>,
    /// Document of each position, `[B, T]`, if attention stays within documents. There are then no
    /// past positions.
    pub documents: Option<Tensor<B, 2, Int>>,
}

impl<B: Backend> Positions<B> {
    /// `[B, T, heads, d]` → `[B, heads, T, d]`, with each token rotated by its position.
    fn rotate(&self, x: Tensor<B, 4>) -> Tensor<B, 4> {
        let [batch, len, heads, dim] = x.dims();
        match self.hidden {
            None => self.rope.rotate(x),
            // Treated as one sequence with separate positions for each token.
            Some(_) => {
                let x = self.rope.rotate(x.reshape([1, batch * len, heads, dim]));
                x.reshape([heads, batch, len, dim]).swap_dims(0, 1)
            }
        }
    }
}

impl<B: Backend> Attention<B> {
    /// Attention of these dimensions.
    pub fn new(config: &Dimensions, device: &B::Device) -> Self {
        let hidden = config.hidden_size;
        let q = config.num_heads * config.head_dim;
        let kv = config.num_kv_heads * config.head_dim;
        Self {
            q_proj: with_bias(hidden, q, config.qkv_bias, device),
            k_proj: with_bias(hidden, kv, config.qkv_bias, device),
            v_proj: with_bias(hidden, kv, config.qkv_bias, device),
            o_proj: linear(q, hidden, device),
            q_norm: config.qk_norm.then(|| norm(config.head_dim, config.rms_norm_eps, device)),
            k_norm: config.qk_norm.then(|| norm(config.head_dim, config.rms_norm_eps, device)),
            head_dim: config.head_dim,
        }
    }

    /// `[B·T, H]` → `[B·T, H]`.
    pub fn forward(
        &self,
        x: Tensor<B, 2>,
        positions: &Positions<B>,
        cache: Option<&mut LayerCache<B>>,
    ) -> Tensor<B, 2> {
        let &Positions { batch, len, past, .. } = positions;
        let rows = batch * len;
        // With tensor parallelism, x has this rank's tokens, and q, k and v its heads of all tokens.
        let heads = |x: Tensor<B, 2>| {
            let heads = x.dims()[1] / self.head_dim;
            x.reshape([batch, len, heads, self.head_dim])
        };
        let q = heads(self.q_proj.forward(x.clone()));
        let k = heads(self.k_proj.forward(x.clone()));
        let v = heads(self.v_proj.forward(x));
        let q = self.q_norm.iter().fold(q, |q, norm| rms_norm(norm, q));
        let k = self.k_norm.iter().fold(k, |k, norm| rms_norm(norm, k));
        let q = positions.rotate(q);
        let (k, v) = (positions.rotate(k), v.swap_dims(1, 2));
        let options = AttentionModuleOptions { is_causal: true, ..Default::default() };
        let y = match cache {
            Some(cache) => {
                cache.append([k, v], past);
                cache.attention(q, past + len, positions.hidden.as_ref(), options)
            }
            None => attention(q, k, v, positions.documents.clone(), options),
        };
        self.o_proj.forward(y.swap_dims(1, 2).reshape([rows as i32, -1]))
    }
}
