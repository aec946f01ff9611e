//! [`Mlp`]: SwiGLU.

use burn::module::Module;
use burn::nn::Linear;
use burn::tensor::Tensor;
use burn::tensor::backend::Backend;
use burn_float8::nn::swiglu;

use crate::dims::Dimensions;
use crate::linear::linear;

/// SwiGLU: `down(silu(gate(x)) ⊙ up(x))`.
#[derive(Module, Debug)]
pub struct Mlp<B: Backend> {
    /// `[H, intermediate]`.
    pub gate_proj: Linear<B>,
    /// `[H, intermediate]`.
    pub up_proj: Linear<B>,
    /// `[intermediate, H]`.
    pub down_proj: Linear<B>,
}

impl<B: Backend> Mlp<B> {
    /// SwiGLU with these widths.
    pub fn new(dims: &Dimensions, device: &B::Device) -> Self {
        let (hidden, intermediate) = (dims.hidden_size, dims.intermediate_size);
        Self {
            gate_proj: linear(hidden, intermediate, device),
            up_proj: linear(hidden, intermediate, device),
            down_proj: linear(intermediate, hidden, device),
        }
    }

    /// `[M, H]` → `[M, H]`.
    pub fn forward(&self, x: Tensor<B, 2>) -> Tensor<B, 2> {
        let gate = self.gate_proj.forward(x.clone());
        self.down_proj.forward(swiglu(gate, self.up_proj.forward(x)))
    }
}
