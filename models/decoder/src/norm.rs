//! RMSNorm in f32, bit for bit as transformers computes it.

use burn::nn::{RmsNorm, RmsNormConfig};
use burn::tensor::Tensor;
use burn::tensor::backend::Backend;

/// An RMSNorm over so many elements.
pub fn norm<B: Backend>(size: usize, epsilon: f64, device: &B::Device) -> RmsNorm<B> {
    RmsNormConfig::new(size).with_epsilon(epsilon).init(device)
}

/// RMSNorm of the last dimension, in f32 whatever the dtype of `x`, which the result has: `x · (1 / √(mean x² + ε)) · γ`.
///
/// Operations are in transformers' order, which multiplies by the inverse root where Burn's own `forward` divides by the
/// root: a last bit that differs flips FP8 codes.
pub fn rms_norm<B: Backend, const D: usize>(norm: &RmsNorm<B>, x: Tensor<B, D>) -> Tensor<B, D> {
    burn_float8::nn::rms_norm(x, norm.gamma.val(), norm.epsilon)
}
