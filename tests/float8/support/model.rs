//! A small transformer-like model: q, k and v share one input, as do gate and up.
use burn::module::Module;
use burn::nn::{Linear, LinearConfig};
use burn::tensor::{Tensor, activation, backend::Backend};

use super::normal;
use super::operand::tensor;

/// Width of the model.
pub const D: usize = 16;
/// Width of the feed-forward layer.
pub const FF: usize = 32;

/// Input `[2, 4, D]`.
pub fn input<B: Backend>(seed: u64) -> Tensor<B, 3> {
    tensor(normal(2 * 4 * D, seed), [2, 4, D])
}

/// One transformer block.
#[derive(Module, Debug)]
pub struct Block<B: Backend> {
    pub q: Linear<B>,
    pub k: Linear<B>,
    pub v: Linear<B>,
    pub o: Linear<B>,
    pub gate: Linear<B>,
    pub up: Linear<B>,
    pub down: Linear<B>,
}

/// Blocks and a head.
#[derive(Module, Debug)]
pub struct Model<B: Backend> {
    pub blocks: Vec<Block<B>>,
    pub head: Linear<B>,
}

impl<B: Backend> Block<B> {
    /// Creates a block on the default device.
    pub fn new() -> Self {
        let linear = |k, n| LinearConfig::new(k, n).with_bias(false).init(&Default::default());
        Self {
            q: linear(D, D),
            k: linear(D, D),
            v: linear(D, D),
            o: linear(D, D),
            gate: linear(D, FF),
            up: linear(D, FF),
            down: linear(FF, D),
        }
    }

    /// All linears, in order.
    pub fn linears(&self) -> [&Linear<B>; 7] {
        [&self.q, &self.k, &self.v, &self.o, &self.gate, &self.up, &self.down]
    }

    /// Maps `[batch, tokens, D]` to `[batch, tokens, D]`.
    pub fn forward(&self, x: Tensor<B, 3>) -> Tensor<B, 3> {
        let (q, k, v) = (self.q.forward(x.clone()), self.k.forward(x.clone()), self.v.forward(x.clone()));
        let scores = activation::softmax(q.matmul(k.swap_dims(1, 2)) / 4.0, 2);
        let x = x + self.o.forward(scores.matmul(v));
        let h = activation::silu(self.gate.forward(x.clone())) * self.up.forward(x.clone());
        x + self.down.forward(h)
    }
}

impl<B: Backend> Model<B> {
    /// Creates a model of `n` blocks on the default device.
    pub fn new(n: usize) -> Self {
        let device = Default::default();
        B::seed(&device, 7);
        Self { blocks: (0..n).map(|_| Block::new()).collect(), head: LinearConfig::new(D, 8).init(&device) }
    }

    /// Maps `[batch, tokens, D]` to `[batch, tokens, 8]`.
    pub fn forward(&self, x: Tensor<B, 3>) -> Tensor<B, 3> {
        self.head.forward(self.blocks.iter().fold(x, |x, block| block.forward(x)))
    }
}
