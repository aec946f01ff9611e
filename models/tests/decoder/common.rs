//! Small models of Llama 3's architecture, and their inputs.

use burn::backend::{Autodiff, Flex};
use burn::tensor::backend::Backend;
use burn::tensor::{Int, Tensor, TensorData};
use burn_float8::Float8;
use models::{Decoder, DecoderConfig, Dimensions, MoeConfig, RopeScaling};
use trainer::CausalLmExt;
use trainer::rng::Rng;

/// Backend that trains in FP8.
pub(crate) type Train = Float8<Autodiff<Flex>>;

/// Two layers, three query heads per key head, and heads wider than `hidden / heads`.
pub(crate) fn tiny() -> DecoderConfig {
    tiny_with(|_| {})
}

/// Tiny model with other sizes.
pub(crate) fn tiny_with(change: impl FnOnce(&mut Dimensions)) -> DecoderConfig {
    let mut config = DecoderConfig::preset("debug").unwrap();
    let dims = &mut config.dims;
    (dims.vocab_size, dims.hidden_size, dims.intermediate_size, dims.num_layers) = (288, 48, 80, 2);
    (dims.num_heads, dims.num_kv_heads, dims.head_dim) = (6, 2, 12);
    (dims.rope_theta, dims.max_seq_len, config.rope_scaling) = (10_000.0, 64, None);
    change(dims);
    config
}

/// Four experts in each layer, two for each token.
pub(crate) fn tiny_moe() -> DecoderConfig {
    tiny_with(|dims| dims.moe = Some(MoeConfig { num_experts: 4, num_experts_per_tok: 2 }))
}

pub(crate) fn llama3_scaling() -> RopeScaling {
    RopeScaling { factor: 8.0, low_freq_factor: 1.0, high_freq_factor: 4.0, original_max_position_embeddings: 8192 }
}

pub(crate) fn model<B: Backend>(config: DecoderConfig, seed: u64) -> Decoder<B> {
    Decoder::new(config, &Default::default()).unwrap().init_weights(seed)
}

/// `[B, T]` tokens below `vocab`.
pub(crate) fn tokens(shape: [usize; 2], vocab: usize, seed: u64) -> Vec<i32> {
    let mut rng = Rng::named(seed, "tokens");
    (0..shape[0] * shape[1]).map(|_| rng.below(vocab) as i32).collect()
}

pub(crate) fn ids<B: Backend>(tokens: &[i32], shape: [usize; 2]) -> Tensor<B, 2, Int> {
    Tensor::from_data(TensorData::new(tokens.to_vec(), shape), &Default::default())
}

pub(crate) fn values<B: Backend, const D: usize>(tensor: Tensor<B, D>) -> Vec<f32> {
    tensor.into_data().to_vec().unwrap()
}

/// max |a - b| / max |b|.
pub(crate) fn relative(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    let scale = b.iter().fold(0.0_f32, |max, x| max.max(x.abs()));
    a.iter().zip(b).fold(0.0_f32, |max, (x, y)| max.max((x - y).abs())) / scale
}
