//! [`LayerBytes`]: what each layer of a model keeps of a batch from forward to backward, in bytes.

/// What of a micro-batch and a configuration decides how much its layers keep.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct BatchShape {
    /// Tokens, M.
    pub rows: u64,
    /// Bytes of an element of hidden states.
    pub element: u64,
    /// Bytes that a linear keeps of each element of its input: about 1 in FP8, else those of the element.
    pub linear_input: f64,
    /// Bytes that attention keeps of each element of its output, where its backward reads that: 4 on the CPU, 0 elsewhere.
    pub attention_output: u64,
}

/// What one layer keeps.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LayerBytes {
    /// The layer's input, which activation checkpointing keeps.
    pub input: u64,
    /// The inputs of the norms of the residual stream, the layer's input among them.
    pub residual: u64,
    /// The inputs of attention's linears, and what turns into queries, keys and values and reads them.
    pub attention: u64,
    /// The inputs of the linears of the SwiGLU, and its two factors; and what experts give.
    pub mlp: u64,
    /// `mlp` without what experts give: so large are the gradients that are on their way through a SwiGLU in backward.
    pub swiglu: u64,
}
