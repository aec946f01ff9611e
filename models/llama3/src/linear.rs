//! The linears of all layers: without bias, and how parameters are drawn that nothing else initializes.

use burn::nn::{Initializer, Linear, LinearConfig};
use burn::tensor::backend::Backend;

pub(crate) const INITIALIZER: Initializer = Initializer::Normal { mean: 0.0, std: 0.02 };

/// A linear without bias, `[d_input, d_output]`.
pub(crate) fn linear<B: Backend>(d_input: usize, d_output: usize, device: &B::Device) -> Linear<B> {
    LinearConfig::new(d_input, d_output).with_bias(false).with_initializer(INITIALIZER).init(device)
}
