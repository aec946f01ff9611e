//! [`LanguageModel`]: what training asks of a model.

use burn::module::Module;
use burn::tensor::Tensor;
use burn::tensor::backend::Backend;

use crate::batches::BatchTensors;

/// A model that predicts the next token.
pub trait LanguageModel<B: Backend>: Module<B> {
    /// Mean cross entropy in nats of the targets that count, under the predictions of the inputs: `[1]`, f32; 0 if none counts.
    fn batch_loss(&self, batch: BatchTensors<B>) -> Tensor<B, 1>;

    /// Floating-point operations of one training token, forward and backward, in sequences of `seq_len`.
    fn flops_per_token(&self, seq_len: usize) -> f64;
}
