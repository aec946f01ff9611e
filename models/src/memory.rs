//! Bytes that a decoder's layers keep from forward to backward.
//!
//! ```text
//! residual    h, h + attention                                  M · 2H · element
//! attention   norm(h) for q, k and v                            M · H · input
//!             q and k before and after rotation, v              M · (2Q + 3K) · element
//!             q and k before their norms, if there are any      M · (Q + K) · element
//!             y, and the logarithms of its sums                 M · (Q · output + heads · 4)
//!             y for the output's linear                         M · Q · input
//! swiglu      norm(h) for gate and up, gate, up, their product  M · (H + I) · input + M · 2I · element
//! mlp         swiglu; for E experts per token E times swiglu,
//!             and their outputs                                 M · (2E + 1) · H · element
//! ```
//! With tensor parallelism each rank has its part of heads, I and the residual, and norm(h) of all tokens.
//! Q is heads · head_dim, K is kv_heads · head_dim, I the width of the SwiGLU; element, input and
//! output are the bytes of [`BatchShape`].

use std::num::Saturating;

use trainer::{BatchShape, LayerBytes};

use crate::dims::{Dimensions, MoeConfig};

impl Dimensions {
    /// Bytes that one layer keeps of a batch, without positions and masks. Arithmetic saturates at
    /// 64 bits.
    pub fn layer_bytes(&self, shape: &BatchShape) -> LayerBytes {
        let BatchShape { rows, element, linear_input, attention_output, ranks } = *shape;
        let [hidden, heads, kv_heads, head_dim] =
            [self.hidden_size, self.num_heads, self.num_kv_heads, self.head_dim].map(|size| Saturating(size as u64));
        let [rows, element, attention_output, ranks] = [rows, element, attention_output, ranks].map(Saturating);
        let (heads, kv_heads) = (heads / ranks, kv_heads / ranks);
        let [two, three] = [2, 3].map(Saturating);
        let (q, k) = (heads * head_dim, kv_heads * head_dim);
        let input = |elements: Saturating<u64>| Saturating((elements.0 as f64 * linear_input) as u64);
        let before_norms = if self.qk_norm { q + k } else { Saturating(0) };
        let attention = element * (two * q + three * k + before_norms)
            + attention_output * q
            + Saturating(4) * heads
            + input(hidden + q);
        let intermediate = Saturating(self.intermediate_size as u64) / ranks;
        let swiglu = input(hidden + intermediate) + two * element * intermediate;
        let (swiglu, outputs) = match self.moe {
            None => (swiglu, Saturating(0)),
            // Each token is a row of several experts: their inputs, and their outputs, which are
            // multiplied by the weights.
            Some(MoeConfig { num_experts_per_tok, .. }) => {
                let experts = Saturating(num_experts_per_tok as u64);
                (experts * swiglu, experts * two * element * hidden + element * hidden)
            }
        };
        LayerBytes {
            input: (rows * element * hidden / ranks).0,
            residual: (rows * two * element * hidden / ranks).0,
            attention: (rows * attention).0,
            mlp: (rows * (swiglu + outputs)).0,
            swiglu: (rows * swiglu).0,
        }
    }
}
