//! [`Decoder`]: a decoder-only transformer as a Burn module whose field names are Hugging Face's.
//!
//! ```text
//! h ← embed(tokens)
//! h ← h + attention(rmsnorm(h))                                   per layer
//! h ← h + down(silu(gate(n)) ⊙ up(n)),  n = rmsnorm(h)            or a mixture of n
//! logits = lm_head(rmsnorm(h))
//! ```
//! Hidden states are `[B·T, H]` matrices in the compute dtype; norms, softmax, logits and the loss
//! are in f32.

use anyhow::Result;
use burn::module::Module;
use burn::nn::{Embedding, EmbeddingConfig, Linear, RmsNorm};
use burn::tensor::backend::Backend;
use burn::tensor::{DType, Int, Tensor};
use trainer::batches::BatchTensors;
use trainer::{CacheOptions, CausalLm, LanguageModel, ModelConfig, Segments};

use crate::architecture::DecoderConfig;
use crate::attention::{Attention, Positions};
use crate::cache::{KvCache, LayerCache};
use crate::config::rotary_frequencies;
use crate::forward::{Layer, Parts};
use crate::linear::{INITIALIZER, linear};
use crate::mlp::Mlp;
use crate::moe::Moe;
use crate::norm::{norm, rms_norm};
use crate::rope::RotaryEmbedding;

/// One decoder layer.
#[derive(Module, Debug)]
pub struct DecoderLayer<B: Backend> {
    /// Norm before attention.
    pub input_layernorm: RmsNorm<B>,
    /// Grouped-query attention.
    pub self_attn: Attention<B>,
    /// Norm before the MLP.
    pub post_attention_layernorm: RmsNorm<B>,
    /// SwiGLU; `None` in a mixture.
    pub mlp: Option<Mlp<B>>,
    /// Mixture of SwiGLUs; `None` in a dense model.
    pub moe: Option<Moe<B>>,
}

/// Decoder-only transformer with f32 parameters.
#[derive(Module, Debug)]
pub struct Decoder<B: Backend> {
    /// `[V, H]`.
    pub embed_tokens: Embedding<B>,
    /// Decoder layers, first to last.
    pub layers: Vec<DecoderLayer<B>>,
    /// Norm before the output layer.
    pub norm: RmsNorm<B>,
    /// `[H, V]`; `None` if the output is tied to the embedding.
    pub lm_head: Option<Linear<B>>,
    rope: RotaryEmbedding<B>,
    #[module(skip)]
    config: DecoderConfig,
    #[module(skip)]
    compute_dtype: DType,
}

impl<B: Backend> Decoder<B> {
    /// Creates a model with lazily initialized parameters, `N(0, 0.02²)` from the backend's
    /// generator. [`init_weights`](trainer::CausalLmExt::init_weights) gives reproducible ones,
    /// [`load_hf`](trainer::CausalLmExt::load_hf) loads them.
    ///
    /// # Errors
    /// An invalid field.
    pub fn new(config: DecoderConfig, device: &B::Device) -> Result<Self> {
        config.validate()?;
        let dims = config.dims;
        let norm = || norm(dims.hidden_size, dims.rms_norm_eps, device);
        let layers = (0..dims.num_layers).map(|_| DecoderLayer {
            input_layernorm: norm(),
            self_attn: Attention::new(&dims, device),
            post_attention_layernorm: norm(),
            mlp: dims.moe.is_none().then(|| Mlp::new(&dims, device)),
            moe: dims.moe.map(|moe| Moe::new(dims.hidden_size, dims.intermediate_size, moe, device)),
        });
        let untied = !dims.tie_word_embeddings;
        let embedding = EmbeddingConfig::new(dims.vocab_size, dims.hidden_size).with_initializer(INITIALIZER);
        Ok(Self {
            embed_tokens: embedding.init(device),
            layers: layers.collect(),
            norm: norm(),
            lm_head: untied.then(|| linear(dims.hidden_size, dims.vocab_size, device)),
            rope: RotaryEmbedding::new(rotary_frequencies(&config), dims.max_seq_len, device),
            config,
            compute_dtype: DType::F32,
        })
    }

    /// Dimensions.
    pub fn config(&self) -> &DecoderConfig {
        &self.config
    }

    /// Sets the dtype of hidden states and GEMM results. Parameters stay in f32, so a dtype other
    /// than f32 needs a backend whose linears mix dtypes, such as `Float8<B>`.
    pub fn with_compute_dtype(mut self, dtype: DType) -> Self {
        self.compute_dtype = dtype;
        self
    }

    /// Logits in f32, `[B, T, V]`, for `tokens` `[B, T]`, all in `0..V`.
    pub fn forward(&self, tokens: Tensor<B, 2, Int>) -> Tensor<B, 3> {
        self.parts().forward(tokens)
    }

    /// Logits in f32 of the last position only, `[B, V]`, for `tokens` `[B, T]` after the positions
    /// in `cache`, which are appended to it.
    pub fn forward_cached(&self, tokens: Tensor<B, 2, Int>, cache: &mut KvCache<B>) -> Tensor<B, 2> {
        self.parts().forward_cached(tokens, cache)
    }

    /// Mean cross entropy in f32 of `targets` under the logits of `inputs`, both `[B, T]`: `[1]`.
    pub fn loss(&self, inputs: Tensor<B, 2, Int>, targets: Tensor<B, 2, Int>) -> Tensor<B, 1> {
        self.batch_loss(BatchTensors { inputs, targets, loss_mask: None, documents: None })
    }

    fn parts(&self) -> Parts<'_, B, DecoderLayer<B>> {
        Parts {
            embed_tokens: &self.embed_tokens,
            layers: &self.layers,
            norm: &self.norm,
            lm_head: self.lm_head.as_ref(),
            rope: &self.rope,
            compute_dtype: self.compute_dtype,
        }
    }
}

impl<B: Backend> LanguageModel<B> for Decoder<B> {
    fn batch_loss(&self, batch: BatchTensors<B>) -> Tensor<B, 1> {
        self.parts().loss(batch)
    }

    fn segments<'a>(&'a self, batch: BatchTensors<B>) -> Option<Box<dyn Segments<B> + 'a>> {
        Some(Box::new(self.parts().pass(batch)))
    }

    fn vocab_size(&self) -> Option<usize> {
        Some(self.config.dims.vocab_size)
    }

    fn flops_per_token(&self, seq_len: usize) -> f64 {
        self.config.dims.flops_per_token(seq_len)
    }
}

impl<B: Backend> CausalLm<B> for Decoder<B> {
    type Config = DecoderConfig;
    type Cache = KvCache<B>;

    fn new(config: DecoderConfig, device: &B::Device) -> Result<Self> {
        Self::new(config, device)
    }

    fn config(&self) -> &DecoderConfig {
        self.config()
    }

    fn with_compute_dtype(self, dtype: DType) -> Self {
        self.with_compute_dtype(dtype)
    }

    fn new_cache(&self, options: &CacheOptions) -> KvCache<B> {
        KvCache::new(self.layers.len(), options)
    }

    fn forward_cached(&self, tokens: Tensor<B, 2, Int>, cache: &mut KvCache<B>) -> Tensor<B, 2> {
        self.forward_cached(tokens, cache)
    }
}

impl<B: Backend> Layer<B> for DecoderLayer<B> {
    fn forward(&self, h: Tensor<B, 2>, positions: &Positions<B>, cache: Option<&mut LayerCache<B>>) -> Tensor<B, 2> {
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
