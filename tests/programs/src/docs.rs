//! Model shared by the code blocks of `docs/*.md`, as defined by the first program of
//! `docs/wrap-your-model.md`.

use burn::backend::{Autodiff, Flex};
use burn::nn::loss::{MseLoss, Reduction};
use burn::nn::{Linear, LinearConfig};
pub use burn::prelude::*;
use burn::tensor::Distribution;
use burn_float8::Float8;

/// CPU backend with FP8 and gradients.
pub type B = Float8<Autodiff<Flex>>;

/// Linears with residual connections, and one at the end.
#[derive(Module, Debug)]
pub struct Mlp<B: Backend> {
    /// `layers.0` to `layers.3`, 32 to 32 features.
    pub layers: Vec<Linear<B>>,
    /// 32 features to one.
    pub head: Linear<B>,
}

impl<B: Backend> Mlp<B> {
    /// Creates a model with random weights.
    pub fn new(device: &B::Device) -> Self {
        let linear = |n| LinearConfig::new(32, n).init(device);
        Self { layers: (0..4).map(|_| linear(32)).collect(), head: linear(1) }
    }

    /// Mean squared error on a new random batch `[64, 32]`. The target is the mean of each row.
    pub fn loss(&self) -> Tensor<B, 1> {
        let x = Tensor::<B, 2>::random([64, 32], Distribution::Default, &self.head.weight.device());
        let h = self.layers.iter().fold(x.clone(), |x, layer| x.clone() + layer.forward(x).tanh());
        MseLoss::new().forward(self.head.forward(h), x.mean_dim(1), Reduction::Mean)
    }
}
