//! [`Parts`]: forward pass of a decoder-only transformer, from tokens to logits or a loss.

use std::ops::Range;

use burn::nn::{Embedding, Linear, RmsNorm};
use burn::tensor::backend::Backend;
use burn::tensor::{DType, Int, Tensor};
use burn_float8::nn::{parallel_log_likelihood, parallel_ranks, parallel_tokens};
use float8_shard::full_tensor;
use trainer::Segments;
use trainer::batches::BatchTensors;

use crate::attention::Positions;
use crate::cache::{KvCache, LayerCache};
use crate::norm::rms_norm;
use crate::rope::RotaryEmbedding;

/// One decoder layer.
pub trait Layer<B: Backend> {
    /// `[B·T, H]` → `[B·T, H]`. With a cache, the positions follow the cached ones.
    fn forward(&self, h: Tensor<B, 2>, positions: &Positions<B>, cache: Option<&mut LayerCache<B>>) -> Tensor<B, 2>;
}

/// Parts of a model's module.
#[derive(Debug)]
pub struct Parts<'a, B: Backend, L> {
    /// `[V, H]`.
    pub embed_tokens: &'a Embedding<B>,
    /// Decoder layers, first to last.
    pub layers: &'a [L],
    /// Norm before the output layer.
    pub norm: &'a RmsNorm<B>,
    /// `[H, V]`; `None` if the output is tied to the embedding.
    pub lm_head: Option<&'a Linear<B>>,
    /// Rotary tables.
    pub rope: &'a RotaryEmbedding<B>,
    /// Dtype of hidden states.
    pub compute_dtype: DType,
}

impl<'a, B: Backend, L: Layer<B>> Parts<'a, B, L> {
    /// Logits in f32, `[B, T, V]`, for `tokens` `[B, T]`, all in `0..V`.
    pub fn forward(&self, tokens: Tensor<B, 2, Int>) -> Tensor<B, 3> {
        let [batch, len] = tokens.dims();
        let positions = self.positions(&tokens, 0, None);
        let hidden = self.layers.iter().fold(self.embed(tokens), |h, layer| layer.forward(h, &positions, None));
        let logits = self.logits(hidden);
        let vocab_size = logits.dims()[1];
        logits.reshape([batch, len, vocab_size])
    }

    /// Logits in f32 of the last position only, `[B, V]`, for `tokens` `[B, T]` after the positions
    /// in `cache`, which are appended to it.
    pub fn forward_cached(&self, tokens: Tensor<B, 2, Int>, cache: &mut KvCache<B>) -> Tensor<B, 2> {
        let [batch, len] = tokens.dims();
        let mut positions = self.positions(&tokens, cache.len, None);
        if let Some(next) = cache.next_of_each(len) {
            positions.rope = self.rope.at_each(&next);
            positions.hidden = cache.hidden(cache.len + len, &tokens.device());
        }
        let mut h = self.embed(tokens);
        for (layer, slot) in self.layers.iter().zip(&mut cache.layers) {
            h = layer.forward(h, &positions, Some(slot));
        }
        cache.len += len;
        let width = h.dims()[1];
        let last = h.reshape([batch, len, width]).slice([0..batch, len - 1..len, 0..width]);
        let last = last.reshape([batch, width]);
        if !cache.rows_alone {
            return self.logits(last);
        }
        Tensor::cat((0..batch).map(|row| self.logits(last.clone().slice_dim(0, row..row + 1))).collect(), 0)
    }

    /// Mean cross entropy in f32 over the counted targets: `[1]`.
    pub fn loss(self, batch: BatchTensors<B>) -> Tensor<B, 1> {
        let pass = self.pass(batch);
        let hidden = (0..pass.len()).fold(pass.first(), |h, index| pass.segment(index, h));
        pass.loss(hidden, 0..pass.rows())
    }

    /// Forward pass of a batch to its loss, layer by layer.
    pub fn pass(self, batch: BatchTensors<B>) -> Pass<'a, B, L> {
        let BatchTensors { inputs, targets, loss_mask, documents } = batch;
        let [sequences, len] = inputs.dims();
        let rows = sequences * len;
        Pass {
            positions: self.positions(&inputs, 0, documents),
            ranks: parallel_ranks(&self.output_weight()),
            parts: self,
            inputs,
            targets: targets.reshape([rows]),
            mask: loss_mask.map(|mask| mask.reshape([rows])),
        }
    }

    /// Positions of `tokens` after `past` earlier ones.
    fn positions(&self, tokens: &Tensor<B, 2, Int>, past: usize, documents: Option<Tensor<B, 2, Int>>) -> Positions<B> {
        let [batch, len] = tokens.dims();
        let rope = self.rope.at(past..past + len);
        Positions { batch, len, past, rope, hidden: None, documents }
    }

    /// `[B, T]` → `[B·T, H]`.
    fn embed(&self, tokens: Tensor<B, 2, Int>) -> Tensor<B, 2> {
        let embedded = self.embed_tokens.forward(tokens).cast(self.compute_dtype);
        let [batch, len, width] = embedded.dims();
        embedded.reshape([batch * len, width])
    }

    /// `[M, H]` → `[M, V]`, f32, including the final norm.
    fn logits(&self, hidden: Tensor<B, 2>) -> Tensor<B, 2> {
        let hidden = rms_norm(self.norm, hidden);
        let logits = match self.lm_head {
            Some(lm_head) => lm_head.forward(hidden),
            // A matmul, not a linear: a tied output layer has no name for a filter, so it never
            // runs in FP8.
            None => {
                let table = self.output_weight();
                let weight = full_tensor(table.clone().cast(hidden.dtype()));
                parallel_tokens(hidden, &table).matmul(weight.transpose())
            }
        };
        logits.cast(DType::F32)
    }

    /// Weight of the output layer.
    fn output_weight(&self) -> Tensor<B, 2> {
        self.lm_head.map_or(&self.embed_tokens.weight, |lm_head| &lm_head.weight).val()
    }
}

/// Forward pass of a batch with [`Parts`]: each layer is a segment.
#[derive(Debug)]
pub struct Pass<'a, B: Backend, L> {
    parts: Parts<'a, B, L>,
    positions: Positions<B>,
    inputs: Tensor<B, 2, Int>,
    /// `[M]`.
    targets: Tensor<B, 1, Int>,
    /// `[M]`, 1 for each target that counts; `None` if all count.
    mask: Option<Tensor<B, 1>>,
    /// Ranks that divide the tokens of hidden states.
    ranks: usize,
}

impl<B: Backend, L: Layer<B>> Segments<B> for Pass<'_, B, L> {
    fn first(&self) -> Tensor<B, 2> {
        self.parts.embed(self.inputs.clone())
    }

    fn len(&self) -> usize {
        self.parts.layers.len()
    }

    fn segment(&self, index: usize, hidden: Tensor<B, 2>) -> Tensor<B, 2> {
        self.parts.layers[index].forward(hidden, &self.positions, None)
    }

    fn rows(&self) -> usize {
        self.targets.dims()[0] / self.ranks
    }

    /// `Σ -log softmax(logits)[target]` over the counted rows in `rows`, divided by the count over
    /// all rows, at least 1.
    fn loss(&self, hidden: Tensor<B, 2>, rows: Range<usize>) -> Tensor<B, 1> {
        let is_whole = rows.len() == self.rows();
        let count = rows.len() * self.ranks;
        // The same rows of each rank.
        let [ranks, own] = [self.ranks, self.rows()];
        let targets = self.targets.clone().reshape([ranks, own]).slice_dim(1, rows.clone()).reshape([count]);
        let likelihoods = parallel_log_likelihood(self.parts.logits(hidden), targets, &self.parts.output_weight());
        match &self.mask {
            None if is_whole => likelihoods.mean().neg(),
            None => likelihoods.sum().neg().div_scalar((own * ranks) as f64),
            Some(mask) => {
                let counted = mask.clone().sum().clamp_min(1.0);
                let mask = mask.clone().reshape([ranks, own]).slice_dim(1, rows).reshape([count]);
                (likelihoods.reshape([count]) * mask).sum().neg() / counted
            }
        }
    }
}
