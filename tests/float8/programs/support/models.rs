//! Small models: two linears, and a transformer block.
use burn::module::Module;
use burn::nn::{Linear, LinearConfig};
use burn::tensor::{Tensor, activation, backend::Backend};

pub use crate::support::model::{Block, D, input};

/// Two linears with an activation between them.
#[derive(Module, Debug)]
pub struct Mlp<B: Backend> {
    pub first: Linear<B>,
    pub second: Linear<B>,
}

impl<B: Backend> Mlp<B> {
    /// Creates the model on the default device.
    pub fn new() -> Self {
        let linear = |k, n| LinearConfig::new(k, n).init(&Default::default());
        Self { first: linear(D, 2 * D), second: linear(2 * D, 4) }
    }

    /// `[.., D]` to `[.., 4]`.
    pub fn forward<const R: usize>(&self, x: Tensor<B, R>) -> Tensor<B, R> {
        self.second.forward(activation::relu(self.first.forward(x)))
    }
}
