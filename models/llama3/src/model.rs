//! Llama 3 as a Burn module whose field names are Hugging Face's.
//!
//! ```text
//! h ← embed(tokens)
//! h ← h + attention(rmsnorm(h));  h ← h + down(silu(gate(n)) ⊙ up(n)), n = rmsnorm(h)     per layer; or a mixture of n
//! logits = lm_head(rmsnorm(h))
//! ```
//! Hidden states are `[B·T, H]` matrices in the compute dtype; norms, softmax, logits and the loss are in f32.

use burn::module::Module;
use burn::nn::{Embedding, EmbeddingConfig, Linear, RmsNorm, RmsNormConfig};
use burn::tensor::activation::{log_softmax, silu};
use burn::tensor::backend::Backend;
use burn::tensor::{DType, Int, Tensor};
use float8_shard::full_tensor;
use train::LanguageModel;
use train::batches::BatchTensors;

use crate::Error;
use crate::attention::{Attention, KvCache, Positions, attention_mask};
use crate::config::LlamaConfig;
use crate::linear::{INITIALIZER, linear};
use crate::moe::Moe;
use crate::rope::RotaryEmbedding;

/// SwiGLU: `down(silu(gate(x)) ⊙ up(x))`.
#[derive(Module, Debug)]
pub struct Mlp<B: Backend> {
    /// `[H, intermediate]`.
    pub gate_proj: Linear<B>,
    /// `[H, intermediate]`.
    pub up_proj: Linear<B>,
    /// `[intermediate, H]`.
    pub down_proj: Linear<B>,
}

/// One decoder layer.
#[derive(Module, Debug)]
pub struct DecoderLayer<B: Backend> {
    /// Before attention.
    pub input_layernorm: RmsNorm<B>,
    /// Grouped-query attention.
    pub self_attn: Attention<B>,
    /// Before the MLP.
    pub post_attention_layernorm: RmsNorm<B>,
    /// SwiGLU; none in a mixture.
    pub mlp: Option<Mlp<B>>,
    /// A mixture of SwiGLUs; none in a dense model.
    pub moe: Option<Moe<B>>,
}

/// A Llama 3 model with f32 parameters.
#[derive(Module, Debug)]
pub struct Llama<B: Backend> {
    /// `[V, H]`.
    pub embed_tokens: Embedding<B>,
    /// Decoder layers, first to last.
    pub layers: Vec<DecoderLayer<B>>,
    /// Before the output layer.
    pub norm: RmsNorm<B>,
    /// `[H, V]`; none if the output is tied to the embedding.
    pub lm_head: Option<Linear<B>>,
    rope: RotaryEmbedding<B>,
    #[module(skip)]
    config: LlamaConfig,
    #[module(skip)]
    compute_dtype: DType,
}

impl<B: Backend> Llama<B> {
    /// A model of these dimensions whose parameters are drawn when first used, `N(0, 0.02²)` from the backend's
    /// generator. [`init_weights`](Self::init_weights) makes them reproducible, [`load_hf`](Self::load_hf) loads them.
    ///
    /// # Errors
    /// [`Error::ModelConfig`].
    pub fn new(config: LlamaConfig, device: &B::Device) -> Result<Self, Error> {
        config.validate()?;
        let norm = || RmsNormConfig::new(config.hidden_size).with_epsilon(config.rms_norm_eps).init(device);
        let (hidden, intermediate) = (config.hidden_size, config.intermediate_size);
        let layers = (0..config.num_layers).map(|_| DecoderLayer {
            input_layernorm: norm(),
            self_attn: Attention::new(&config, device),
            post_attention_layernorm: norm(),
            mlp: config.moe.is_none().then(|| Mlp {
                gate_proj: linear(hidden, intermediate, device),
                up_proj: linear(hidden, intermediate, device),
                down_proj: linear(intermediate, hidden, device),
            }),
            moe: config.moe.map(|moe| Moe::new(hidden, intermediate, moe, device)),
        });
        let untied = !config.tie_word_embeddings;
        Ok(Self {
            embed_tokens: EmbeddingConfig::new(config.vocab_size, hidden).with_initializer(INITIALIZER).init(device),
            layers: layers.collect(),
            norm: norm(),
            lm_head: untied.then(|| linear(hidden, config.vocab_size, device)),
            rope: RotaryEmbedding::new(&config, device),
            config,
            compute_dtype: DType::F32,
        })
    }

    /// The dimensions.
    pub fn config(&self) -> &LlamaConfig {
        &self.config
    }

    /// Sets the dtype of hidden states and GEMM results; parameters stay in f32, so a dtype other than f32 needs a
    /// backend whose linears mix dtypes, such as `Float8<B>`.
    pub fn with_compute_dtype(mut self, dtype: DType) -> Self {
        self.compute_dtype = dtype;
        self
    }

    /// Logits in f32, `[B, T, V]`, for `tokens` `[B, T]`, all in `0..V`.
    pub fn forward(&self, tokens: Tensor<B, 2, Int>) -> Tensor<B, 3> {
        let [batch, len] = tokens.dims();
        let hidden = self.hidden(tokens, None, None);
        self.logits(hidden).reshape([batch, len, self.config.vocab_size])
    }

    /// Logits in f32 of the last position only, `[B, V]`, for `tokens` `[B, T]` that follow the positions in
    /// `cache`, which then holds them too.
    pub fn forward_cached(&self, tokens: Tensor<B, 2, Int>, cache: &mut KvCache<B>) -> Tensor<B, 2> {
        let [batch, len] = tokens.dims();
        let hidden = self.hidden(tokens, None, Some(cache));
        let width = self.config.hidden_size;
        let last = hidden.reshape([batch, len, width]).slice([0..batch, len - 1..len, 0..width]);
        self.logits(last.reshape([batch, width]))
    }

    /// Mean cross entropy in f32 of `targets` under the logits of `inputs`, both `[B, T]`: `[1]`.
    pub fn loss(&self, inputs: Tensor<B, 2, Int>, targets: Tensor<B, 2, Int>) -> Tensor<B, 1> {
        let [batch, len] = inputs.dims();
        let hidden = self.hidden(inputs, None, None);
        cross_entropy(self.logits(hidden), targets.reshape([batch * len]), None)
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
        let mut h = embedded.reshape([batch * len, self.config.hidden_size]);
        match cache {
            None => {
                for layer in &self.layers {
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
        rms_norm(&self.norm, h)
    }

    /// `[M, H]` → `[M, V]`, f32.
    fn logits(&self, hidden: Tensor<B, 2>) -> Tensor<B, 2> {
        let logits = match &self.lm_head {
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

impl<B: Backend> LanguageModel<B> for Llama<B> {
    fn batch_loss(&self, batch: BatchTensors<B>) -> Tensor<B, 1> {
        let BatchTensors { inputs, targets, loss_mask, documents } = batch;
        let [batch, len] = inputs.dims();
        let hidden = self.hidden(inputs, documents, None);
        cross_entropy(self.logits(hidden), targets.reshape([batch * len]), loss_mask.map(|m| m.reshape([batch * len])))
    }

    fn flops_per_token(&self, seq_len: usize) -> f64 {
        self.config.flops_per_token(seq_len)
    }
}

impl<B: Backend> DecoderLayer<B> {
    /// `[B·T, H]` → `[B·T, H]`.
    fn forward(
        &self,
        h: Tensor<B, 2>,
        positions: &Positions<B>,
        cache: Option<&mut Option<[Tensor<B, 4>; 2]>>,
    ) -> Tensor<B, 2> {
        let x = rms_norm(&self.input_layernorm, h.clone());
        let h = h + self.self_attn.forward(x, positions, cache);
        let x = rms_norm(&self.post_attention_layernorm, h.clone());
        let mut h = h;
        if let Some(mlp) = &self.mlp {
            h = h + mlp.forward(x.clone());
        }
        if let Some(moe) = &self.moe {
            h = h + moe.forward(x);
        }
        h
    }
}

impl<B: Backend> Mlp<B> {
    /// `[M, H]` → `[M, H]`.
    fn forward(&self, x: Tensor<B, 2>) -> Tensor<B, 2> {
        let gate = silu(self.gate_proj.forward(x.clone()));
        self.down_proj.forward(gate * self.up_proj.forward(x))
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

/// RMSNorm in f32 whatever the dtype of `x`, which the result has: `x · (1 / √(mean x² + ε)) · γ`.
///
/// Operations are in transformers' order, which multiplies by the inverse root where Burn's own `forward` divides by the
/// root: a last bit that differs flips FP8 codes.
fn rms_norm<B: Backend>(norm: &RmsNorm<B>, x: Tensor<B, 2>) -> Tensor<B, 2> {
    let dtype = x.dtype();
    let x = x.cast(DType::F32);
    let inverse_rms = (x.clone().square().mean_dim(1) + norm.epsilon).sqrt().recip();
    (x * inverse_rms * norm.gamma.val().unsqueeze()).cast(dtype)
}
