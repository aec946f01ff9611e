//! Small models: two linears, and three linears that share x.
use burn::module::Module;
use burn::nn::{Linear, LinearConfig};
use burn::tensor::{Tensor, activation, backend::Backend};

/// Width of all models here.
pub const D: usize = 16;

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

/// Three linears that share x, between an input and an output linear. There are no biases, so every
/// parameter is a matrix.
#[derive(Module, Debug)]
pub struct Attention<B: Backend> {
    pub embed: Linear<B>,
    pub q: Linear<B>,
    pub k: Linear<B>,
    pub v: Linear<B>,
    pub o: Linear<B>,
}

impl<B: Backend> Attention<B> {
    /// Creates the model on the default device.
    pub fn new() -> Self {
        let linear = || LinearConfig::new(D, D).with_bias(false).init(&Default::default());
        Self { embed: linear(), q: linear(), k: linear(), v: linear(), o: linear() }
    }

    /// All linears, in order.
    pub fn linears(&self) -> [&Linear<B>; 5] {
        [&self.embed, &self.q, &self.k, &self.v, &self.o]
    }

    /// `[.., D]` to `[.., D]`.
    pub fn forward(&self, x: Tensor<B, 3>) -> Tensor<B, 3> {
        let x = activation::relu(self.embed.forward(x));
        let (q, k, v) = (self.q.forward(x.clone()), self.k.forward(x.clone()), self.v.forward(x));
        let scores = activation::softmax(q.matmul(k.swap_dims(1, 2)) / 4.0, 2);
        self.o.forward(scores.matmul(v))
    }
}
