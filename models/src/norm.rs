//! RMSNorm in f32, bit for bit like transformers.

use burn::nn::{RmsNorm, RmsNormConfig};
use burn::tensor::Tensor;
use burn::tensor::backend::Backend;

/// RMSNorm over `size` elements.
pub fn norm<B: Backend>(size: usize, epsilon: f64, device: &B::Device) -> RmsNorm<B> {
    RmsNormConfig::new(size).with_epsilon(epsilon).init(device)
}

/// RMSNorm of the last dimension: `x · (1 / √(mean x² + ε)) · γ`. It computes in f32 and returns
/// the dtype of `x`.
///
/// The order of operations is transformers', which multiplies by the inverse root. Burn's own
/// `forward` divides by the root. A difference in the last bit would flip FP8 codes.
pub fn rms_norm<B: Backend, const D: usize>(norm: &RmsNorm<B>, x: Tensor<B, D>) -> Tensor<B, D> {
    burn_float8::nn::rms_norm(x, norm.gamma.val(), norm.epsilon)
}
