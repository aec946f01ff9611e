//! Rotary position embedding in Hugging Face's rotate-half layout.
//!
//! ```text
//! f_i        = theta^(-2i / head_dim)                                    i in 0..head_dim/2
//! y_i        = x_i · cos(t f_i) - x_{i+half} · sin(t f_i)                t = position
//! y_{i+half} = x_{i+half} · cos(t f_i) + x_i · sin(t f_i)
//! ```
//! Burn's `RotaryEncoding` pairs the neighbours `2i` and `2i + 1` instead, as in Meta's layout.
//! With it, the rows of every `q_proj` and `k_proj` would have to be permuted when a Hugging Face
//! checkpoint is loaded or saved.

use std::ops::Range;

use burn::module::Module;
use burn::tensor::backend::Backend;
use burn::tensor::{DType, Int, Tensor, TensorData};

/// Maximum number of positions with precomputed tables: a checkpoint's `config.json` may give any
/// number.
pub(crate) const MAX_AHEAD: usize = 1 << 17;

/// Angles per position of a model: cos and sin tables in f32, shared by all layers.
#[derive(Module, Debug)]
pub struct RotaryEmbedding<B: Backend> {
    /// `[max_seq_len, head_dim / 2]`.
    cos: Tensor<B, 2>,
    /// `[max_seq_len, head_dim / 2]`.
    sin: Tensor<B, 2>,
    #[module(skip)]
    frequencies: Vec<f32>,
}

/// cos and sin for the positions of one forward pass, each `[T, head_dim / 2]`.
#[derive(Clone, Debug)]
pub struct RotaryTables<B: Backend> {
    cos: Tensor<B, 2>,
    sin: Tensor<B, 2>,
}

/// Rotary frequencies `theta^(-2i / head_dim)`, each modified by `scale`: `head_dim / 2` values,
/// fastest first, in radians per position.
pub fn frequencies(theta: f64, head_dim: usize, scale: impl Fn(f64) -> f64) -> Vec<f32> {
    (0..head_dim / 2).map(|i| scale(theta.powf(-(2.0 * i as f64) / head_dim as f64)) as f32).collect()
}

impl<B: Backend> RotaryEmbedding<B> {
    /// Precomputes tables for positions `0..max_seq_len`, at most the first 131,072.
    pub fn new(frequencies: Vec<f32>, max_seq_len: usize, device: &B::Device) -> Self {
        let [cos, sin] = tables(&frequencies, 0..max_seq_len.min(MAX_AHEAD), device);
        Self { cos, sin, frequencies }
    }

    /// cos and sin for `positions`. Positions beyond the tables are computed on the fly.
    pub fn at(&self, positions: Range<usize>) -> RotaryTables<B> {
        let [max, half] = self.cos.dims();
        let [cos, sin] = if positions.end <= max {
            [&self.cos, &self.sin].map(|table| table.clone().slice([positions.clone(), 0..half]))
        } else {
            tables(&self.frequencies, positions, &self.cos.device())
        };
        RotaryTables { cos, sin }
    }

    /// cos and sin for these positions, in this order.
    pub fn at_each(&self, positions: &[usize]) -> RotaryTables<B> {
        let device = self.cos.device();
        let [cos, sin] = if positions.iter().all(|position| *position < self.cos.dims()[0]) {
            let rows: Vec<_> = positions.iter().map(|position| *position as i64).collect();
            let rows = Tensor::<B, 1, Int>::from_data(rows.as_slice(), &device);
            [&self.cos, &self.sin].map(|table| table.clone().select(0, rows.clone()))
        } else {
            tables(&self.frequencies, positions.iter().copied(), &device)
        };
        RotaryTables { cos, sin }
    }
}

impl<B: Backend> RotaryTables<B> {
    /// Rotates every head of `x`, `[B, T, heads, head_dim]`, in f32. Returns
    /// `[B, heads, T, head_dim]`.
    pub fn rotate(&self, x: Tensor<B, 4>) -> Tensor<B, 4> {
        burn_float8::nn::rotary(x, self.cos.clone(), self.sin.clone())
    }
}

/// `[cos, sin]`, each `[positions, frequencies]`.
fn tables<B: Backend>(
    frequencies: &[f32],
    positions: impl ExactSizeIterator<Item = usize>,
    device: &B::Device,
) -> [Tensor<B, 2>; 2] {
    let shape = [positions.len(), frequencies.len()];
    // The product is rounded to f32, as when the published weights were trained. cos and sin are
    // then exact to f32; a GPU's are not for large angles.
    let angles: Vec<f64> = positions.flat_map(|t| frequencies.iter().map(move |f| f64::from(t as f32 * f))).collect();
    [f64::cos, f64::sin].map(|function| {
        let values: Vec<f32> = angles.iter().map(|&angle| function(angle) as f32).collect();
        Tensor::from_data(TensorData::new(values, shape), (device, DType::F32))
    })
}
