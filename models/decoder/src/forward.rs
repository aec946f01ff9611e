//! [`Parts`]: the forward pass of a decoder-only transformer, from tokens to logits or a loss.

use burn::nn::{Embedding, Linear, RmsNorm};
use burn::tensor::activation::log_softmax;
use burn::tensor::backend::Backend;
use burn::tensor::{DType, Int, Tensor};
use float8_shard::full_tensor;
use train::batches::BatchTensors;

use crate::attention::{KvCache, LayerCache, Positions, attention_mask};
use crate::norm::rms_norm;
use crate::rope::RotaryEmbedding;

/// One decoder layer.
pub trait Layer<B: Backend> {
    /// `[B·T, H]` → `[B·T, H]`; with a cache, of positions that follow those in it.
    fn forward(&self, h: Tensor<B, 2>, positions: &Positions<B>, cache: Option<&mut LayerCache<B>>) -> Tensor<B, 2>;
}

/// What a model's module consists of.
#[derive(Debug)]
pub struct Parts<'a, B: Backend, L> {
    /// `[V, H]`.
    pub embed_tokens: &'a Embedding<B>,
    /// Decoder layers, first to last.
    pub layers: &'a [L],
    /// Before the output layer.
    pub norm: &'a RmsNorm<B>,
    /// `[H, V]`; none if the output is tied to the embedding.
    pub lm_head: Option<&'a Linear<B>>,
    /// The angles of positions.
    pub rope: &'a RotaryEmbedding<B>,
    /// The dtype of hidden states.
    pub compute_dtype: DType,
}

impl<B: Backend, L: Layer<B>> Parts<'_, B, L> {
    /// Logits in f32, `[B, T, V]`, for `tokens` `[B, T]`, all in `0..V`.
    pub fn forward(&self, tokens: Tensor<B, 2, Int>) -> Tensor<B, 3> {
        let [batch, len] = tokens.dims();
        let logits = self.logits(self.hidden(tokens, None, None));
        let vocab_size = logits.dims()[1];
        logits.reshape([batch, len, vocab_size])
    }

    /// Logits in f32 of the last position only, `[B, V]`, for `tokens` `[B, T]` that follow the positions in
    /// `cache`, which then holds them too.
    pub fn forward_cached(&self, tokens: Tensor<B, 2, Int>, cache: &mut KvCache<B>) -> Tensor<B, 2> {
        let [batch, len] = tokens.dims();
        let hidden = self.hidden(tokens, None, Some(cache));
        let width = hidden.dims()[1];
        let last = hidden.reshape([batch, len, width]).slice([0..batch, len - 1..len, 0..width]);
        self.logits(last.reshape([batch, width]))
    }

    /// Mean cross entropy in f32 of the targets that count: `[1]`.
    pub fn loss(&self, batch: BatchTensors<B>) -> Tensor<B, 1> {
        let BatchTensors { inputs, targets, loss_mask, documents } = batch;
        let [sequences, len] = inputs.dims();
        let rows = sequences * len;
        let hidden = self.hidden(inputs, documents, None);
        cross_entropy(self.logits(hidden), targets.reshape([rows]), loss_mask.map(|mask| mask.reshape([rows])))
    }

    fn hidden(
        &self,
        tokens: Tensor<B, 2, Int>,
        documents: Option<Tensor<B, 2, Int>>,
        cache: Option<&mut KvCache<B>>,
    ) -> Tensor<B, 2> {
        let [batch, len] = tokens.dims();
        let device = tokens.device();
        let past = cache.as_ref().map_or(0, |cache| cache.len);
        let positions = Positions {
            batch,
            len,
            rope: self.rope.at(past..past + len),
            mask: attention_mask(past, len, documents, &device),
        };
        let embedded = self.embed_tokens.forward(tokens).cast(self.compute_dtype);
        let width = embedded.dims()[2];
        let mut h = embedded.reshape([batch * len, width]);
        match cache {
            None => {
                for layer in self.layers {
                    h = layer.forward(h, &positions, None);
                }
            }
            Some(cache) => {
                for (layer, slot) in self.layers.iter().zip(&mut cache.layers) {
                    h = layer.forward(h, &positions, Some(slot));
                }
                cache.len += len;
            }
        }
        rms_norm(self.norm, h)
    }

    /// `[M, H]` → `[M, V]`, f32.
    fn logits(&self, hidden: Tensor<B, 2>) -> Tensor<B, 2> {
        let logits = match self.lm_head {
            Some(lm_head) => lm_head.forward(hidden),
            // A matmul, not a linear: a tied output has no name for a filter, so it never runs in FP8.
            None => {
                let weight = full_tensor(self.embed_tokens.weight.val().cast(hidden.dtype()));
                hidden.matmul(weight.transpose())
            }
        };
        logits.cast(DType::F32)
    }
}

/// Mean of `-log softmax(logits)[target]` over the rows that count, all if there is no mask, 0 if there is no such row: `[M, V]`,
/// `[M]`, `[M]` → `[1]`.
fn cross_entropy<B: Backend>(
    logits: Tensor<B, 2>,
    targets: Tensor<B, 1, Int>,
    mask: Option<Tensor<B, 1>>,
) -> Tensor<B, 1> {
    let rows = logits.dims()[0];
    let likelihoods = log_softmax(logits, 1).gather(1, targets.reshape([rows, 1]));
    match mask {
        None => likelihoods.mean().neg(),
        Some(mask) => {
            let count = mask.clone().sum().clamp_min(1.0);
            (likelihoods.reshape([rows]) * mask).sum().neg() / count
        }
    }
}
