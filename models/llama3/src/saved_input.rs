//! What backward keeps of the x of each linear.

use burn::nn::Linear;
use burn::tensor::Tensor;
use burn::tensor::backend::Backend;

/// What backward keeps of the x of each linear.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum SavedInput {
    /// x, as Burn's linear does.
    #[default]
    Full,
    /// Its FP8 operand, where the weight gradient runs in FP8: [`burn_float8::linear`].
    Float8,
}

impl SavedInput {
    /// `[M, K]` → `[M, N]`.
    pub(crate) fn run<B: Backend>(self, linear: &Linear<B>, x: Tensor<B, 2>) -> Tensor<B, 2> {
        match self {
            Self::Full => linear.forward(x),
            Self::Float8 => burn_float8::linear(x, linear.weight.val(), linear.bias.as_ref().map(|bias| bias.val())),
        }
    }
}
