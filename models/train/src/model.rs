//! [`LanguageModel`]: what training asks of a model.

use burn::module::Module;
use burn::tensor::backend::Backend;
use burn::tensor::{Int, Tensor};

/// A model that predicts the next token.
pub trait LanguageModel<B: Backend>: Module<B> {
    /// Mean cross entropy in nats of `targets` under the predictions of `inputs`, both `[batch, seq_len]`: `[1]`, f32.
    fn loss(&self, inputs: Tensor<B, 2, Int>, targets: Tensor<B, 2, Int>) -> Tensor<B, 1>;

    /// Floating-point operations of one training token, forward and backward, in sequences of `seq_len`.
    fn flops_per_token(&self, seq_len: usize) -> f64;
}
