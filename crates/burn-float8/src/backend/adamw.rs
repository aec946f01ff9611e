//! [`AdamWStep`]: what a step of AdamW reads beside tensors, for backends that make it in one pass.
use burn_backend::Backend;
use burn_backend::tensor::FloatTensor;

/// A step of AdamW, in f32, each operation rounded to it:
///
/// ```text
/// m = m β₁ + g (1 - β₁)        v = v β₂ + g g (1 - β₂)             at the first step g (1 - β₁) and g g (1 - β₂)
/// w = w decay - (m / c₁) / (√(v / c₂) + ε) · lr                    c = 1 - β^t
/// ```
/// [Loshchilov and Hutter, 2019](https://arxiv.org/abs/1711.05101), in the order of Burn's operations.
#[derive(Clone, Debug)]
pub struct AdamWStep {
    /// The learning rate.
    pub lr: f32,
    /// β₁ and β₂.
    pub betas: [f32; 2],
    /// ε.
    pub epsilon: f32,
    /// What the parameter is multiplied with first, if it decays.
    pub decay: Option<f32>,
    /// Steps with this one, from 1: t.
    pub time: usize,
    /// How the parameter, m and v are rounded to bf16, each by random bits; without them they are rounded to nearest, to what they are
    /// stored in.
    pub rounding: [Option<RoundingKeys>; 3],
}

/// 16 random bits for each place along each axis of a tensor. Those of an element are the exclusive or of those of its places.
///
/// What becomes of x is the upper 16 bits of `bits(x) + r` where the nearest bf16 is a normal number and |x| is at most the largest one;
/// elsewhere it is the nearest.
#[derive(Clone, Debug)]
pub struct RoundingKeys(pub Vec<Vec<u16>>);

/// What a step changes, or has changed: a parameter, and m and v once there are any.
#[derive(Clone, Debug)]
pub struct AdamWTensors<B: Backend> {
    /// In any float dtype.
    pub param: FloatTensor<B>,
    /// m and v, in any float dtype.
    pub moments: [FloatTensor<B>; 2],
}

/// Makes a step with a gradient; at the first step the values of moments are not read.
pub type AdamWFn<B> = fn(&AdamWStep, AdamWTensors<B>, FloatTensor<B>) -> AdamWTensors<B>;
