//! [`AdamWStep`]: scalar inputs of an AdamW step, for backends that run it in one pass.
use burn_backend::Backend;
use burn_backend::tensor::FloatTensor;

/// AdamW step in f32. Each operation is rounded to f32:
///
/// ```text
/// m = m β₁ + g (1 - β₁)        v = v β₂ + g g (1 - β₂)         first step: g (1 - β₁), g g (1 - β₂)
/// w = w decay - (m / c₁) / (√(v / c₂) + ε) · lr                c = 1 - β^t
/// ```
/// [Loshchilov and Hutter, 2019](https://arxiv.org/abs/1711.05101), in the order of Burn's
/// operations.
#[derive(Clone, Debug)]
pub struct AdamWStep {
    /// Learning rate.
    pub lr: f32,
    /// β₁ and β₂.
    pub betas: [f32; 2],
    /// ε.
    pub epsilon: f32,
    /// Factor applied to the parameter first, if it decays.
    pub decay: Option<f32>,
    /// t: number of steps including this one, from 1.
    pub time: usize,
    /// Stochastic rounding of the parameter, m and v to bf16. Without keys, each is rounded to
    /// nearest in its storage dtype.
    pub rounding: [Option<RoundingKeys>; 3],
}

/// 16 random bits for each index of each axis of a tensor. The bits of an element are the XOR of
/// the bits of its indices.
///
/// x becomes the upper 16 bits of `bits(x) + r` if the nearest bf16 is a normal number and |x| is
/// at most the largest bf16. Other values are rounded to nearest.
#[derive(Clone, Debug)]
pub struct RoundingKeys(pub Vec<Vec<u16>>);

/// Tensors before or after a step: the parameter, m and v.
#[derive(Clone, Debug)]
pub struct AdamWTensors<B: Backend> {
    /// The parameter, in any float dtype.
    pub param: FloatTensor<B>,
    /// m and v, in any float dtype.
    pub moments: [FloatTensor<B>; 2],
}

/// Runs a step with a gradient. At the first step the values of the moments are not read.
pub type AdamWFn<B> = fn(&AdamWStep, AdamWTensors<B>, FloatTensor<B>) -> AdamWTensors<B>;
