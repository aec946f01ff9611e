//! [`LayerBytes`]: bytes that a layer keeps from forward to backward.

/// Properties of a micro-batch and configuration that determine the kept bytes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct BatchShape {
    /// Number of tokens, M.
    pub rows: u64,
    /// Bytes per element of hidden states.
    pub element: u64,
    /// Bytes that a linear keeps per element of its input: about 1 in FP8, else the bytes of the
    /// element.
    pub linear_input: f64,
    /// Bytes that attention keeps per element of its output, beside the next linear's input.
    pub attention_output: u64,
    /// Ranks of tensor parallelism. Each has some tokens of hidden states, and some columns of all tokens.
    pub ranks: u64,
}

/// Bytes kept by one layer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LayerBytes {
    /// The layer's input, which activation checkpointing keeps.
    pub input: u64,
    /// Inputs of the norms on the residual stream, including the layer's input.
    pub residual: u64,
    /// Inputs of attention's linears, and intermediates for computing and reading queries, keys and
    /// values.
    pub attention: u64,
    /// Inputs of SwiGLU's linears, its two factors, and outputs of experts.
    pub mlp: u64,
    /// `mlp` without the outputs of experts: bytes of the gradients inside a SwiGLU in backward.
    pub swiglu: u64,
}
