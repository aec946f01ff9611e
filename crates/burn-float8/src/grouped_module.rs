//! [`GroupedLinear`]: the weights of a mixture's experts as one parameter, which [`Float8Config::apply`](crate::Float8Config::apply)
//! finds.
use burn::module::{Module, Param};
use burn::nn::Initializer;
use burn::tensor::backend::Backend;
use burn::tensor::{Int, Tensor};

use crate::backend::Float8Ops;
use crate::grouped::grouped_linear;

/// One linear without bias for each group of rows, such as the experts of a mixture.
#[derive(Module, Debug)]
pub struct GroupedLinear<B: Backend> {
    /// `[G, K, N]`.
    pub weight: Param<Tensor<B, 3>>,
}

impl<B: Backend> GroupedLinear<B> {
    /// `groups` linears from `d_input` to `d_output` features.
    pub fn new(groups: usize, d_input: usize, d_output: usize, initializer: &Initializer, device: &B::Device) -> Self {
        let weight = initializer.init_with([groups, d_input, d_output], Some(d_input), Some(d_output), device);
        Self { weight }
    }
}

impl<B: Float8Ops> GroupedLinear<B> {
    /// [`grouped_linear`](crate::grouped_linear): x `[M, K]`, ends `[G]` → `[M, N]`.
    ///
    /// # Panics
    ///
    /// As [`grouped_linear`](crate::grouped_linear).
    pub fn forward(&self, x: Tensor<B, 2>, ends: Tensor<B, 1, Int>) -> Tensor<B, 2> {
        grouped_linear(x, self.weight.val(), ends)
    }
}
