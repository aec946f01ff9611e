//! Linears of a decoder.

use burn::nn::{Initializer, Linear, LinearConfig};
use burn::tensor::backend::Backend;

/// Default initializer of parameters.
pub const INITIALIZER: Initializer = Initializer::Normal { mean: 0.0, std: 0.02 };

/// Linear without bias, `[d_input, d_output]`.
pub fn linear<B: Backend>(d_input: usize, d_output: usize, device: &B::Device) -> Linear<B> {
    with_bias(d_input, d_output, false, device)
}

/// Linear with or without bias, `[d_input, d_output]`.
pub(crate) fn with_bias<B: Backend>(d_input: usize, d_output: usize, bias: bool, device: &B::Device) -> Linear<B> {
    LinearConfig::new(d_input, d_output).with_bias(bias).with_initializer(INITIALIZER).init(device)
}
