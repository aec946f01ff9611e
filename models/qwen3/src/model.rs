//! Qwen3 as a Burn module whose field names are Hugging Face's.
//!
//! ```text
//! h ← h + attention(rmsnorm(h))     per layer; each head of q and k passes an RMSNorm
//! h ← h + mlp(rmsnorm(h))
//! ```

use anyhow::Result;
use burn::module::Module;
use burn::nn::{Embedding, EmbeddingConfig, Linear, RmsNorm};
use burn::tensor::backend::Backend;
use burn::tensor::{DType, Int, Tensor};
use decoder::rope::{RotaryEmbedding, frequencies};
use decoder::{Attention, INITIALIZER, KvCache, Layer, LayerCache, Mlp, Parts, Positions, linear, norm, rms_norm};
use train::batches::BatchTensors;
use train::{CacheOptions, CausalLm, LanguageModel, ModelConfig, Segments};

use crate::config::Qwen3Config;

/// One decoder layer.
#[derive(Module, Debug)]
pub struct DecoderLayer<B: Backend> {
    /// Norm before attention.
    pub input_layernorm: RmsNorm<B>,
    /// Grouped-query attention.
    pub self_attn: Attention<B>,
    /// Norm before the MLP.
    pub post_attention_layernorm: RmsNorm<B>,
    /// SwiGLU.
    pub mlp: Mlp<B>,
}

/// A Qwen3 model with f32 parameters.
#[derive(Module, Debug)]
pub struct Qwen3<B: Backend> {
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
    config: Qwen3Config,
    #[module(skip)]
    compute_dtype: DType,
}

impl<B: Backend> Qwen3<B> {
    /// Creates a model with lazily initialized parameters, `N(0, 0.02²)` from the backend's
    /// generator. [`init_weights`](train::CausalLmExt::init_weights) gives reproducible ones,
    /// [`load_hf`](train::CausalLmExt::load_hf) loads them.
    ///
    /// # Errors
    /// An invalid dimension.
    pub fn new(config: Qwen3Config, device: &B::Device) -> Result<Self> {
        config.validate()?;
        let dims = config.dims;
        let norm = || norm(dims.hidden_size, dims.rms_norm_eps, device);
        let layers = (0..dims.num_layers).map(|_| DecoderLayer {
            input_layernorm: norm(),
            self_attn: Attention::new(&dims, device),
            post_attention_layernorm: norm(),
            mlp: Mlp::new(&dims, device),
        });
        let untied = !dims.tie_word_embeddings;
        let embedding = EmbeddingConfig::new(dims.vocab_size, dims.hidden_size).with_initializer(INITIALIZER);
        let frequencies = frequencies(dims.rope_theta, dims.head_dim, |frequency| frequency);
        Ok(Self {
            embed_tokens: embedding.init(device),
            layers: layers.collect(),
            norm: norm(),
            lm_head: untied.then(|| linear(dims.hidden_size, dims.vocab_size, device)),
            rope: RotaryEmbedding::new(frequencies, dims.max_seq_len, device),
            config,
            compute_dtype: DType::F32,
        })
    }

    /// Logits in f32, `[B, T, V]`, for `tokens` `[B, T]`, all in `0..V`.
    pub fn forward(&self, tokens: Tensor<B, 2, Int>) -> Tensor<B, 3> {
        self.parts().forward(tokens)
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

impl<B: Backend> LanguageModel<B> for Qwen3<B> {
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

impl<B: Backend> CausalLm<B> for Qwen3<B> {
    type Config = Qwen3Config;
    type Cache = KvCache<B>;

    fn new(config: Qwen3Config, device: &B::Device) -> Result<Self> {
        Self::new(config, device)
    }

    fn config(&self) -> &Qwen3Config {
        &self.config
    }

    fn with_compute_dtype(self, compute_dtype: DType) -> Self {
        Self { compute_dtype, ..self }
    }

    fn new_cache(&self, options: &CacheOptions) -> KvCache<B> {
        KvCache::new(self.layers.len(), options)
    }

    fn forward_cached(&self, tokens: Tensor<B, 2, Int>, cache: &mut KvCache<B>) -> Tensor<B, 2> {
        self.parts().forward_cached(tokens, cache)
    }
}

impl<B: Backend> Layer<B> for DecoderLayer<B> {
    fn forward(&self, h: Tensor<B, 2>, positions: &Positions<B>, cache: Option<&mut LayerCache<B>>) -> Tensor<B, 2> {
        let x = rms_norm(&self.input_layernorm, h.clone());
        let h = h + self.self_attn.forward(x, positions, cache);
        let x = rms_norm(&self.post_attention_layernorm, h.clone());
        h + self.mlp.forward(x)
    }
}
