//! The operations around linears in Burn's own operations, which fuse if the backend does.

use burn::tensor::backend::Backend;
use burn::tensor::{DType, Tensor};

/// Constant of [`rms_norm`].
pub const EPSILON: f64 = 1e-5;

/// RMSNorm of the last axis, computed in f32.
pub fn rms_norm<B: Backend, const D: usize>(x: Tensor<B, D>, gamma: Tensor<B, 1>) -> Tensor<B, D> {
    let dtype = x.dtype();
    let x = x.cast(DType::F32);
    let inverse_rms = (x.clone().square().mean_dim(D - 1) + EPSILON).sqrt().recip();
    (x * inverse_rms * gamma.cast(DType::F32).unsqueeze()).cast(dtype)
}

/// Rotary positions of x `[B, T, heads, d]`, computed in f32.
pub fn rotary<B: Backend>(x: Tensor<B, 4>, cos: Tensor<B, 2>, sin: Tensor<B, 2>) -> Tensor<B, 4> {
    let (dtype, half) = (x.dtype(), x.dims()[3] / 2);
    let x = x.cast(DType::F32).swap_dims(1, 2);
    let (first, second) = (x.clone().slice_dim(3, 0..half), x.slice_dim(3, half..2 * half));
    let [cos, sin] = [cos, sin].map(|table| table.unsqueeze::<4>());
    let y = first.clone() * cos.clone() - second.clone() * sin.clone();
    Tensor::cat(vec![y, second * cos + first * sin], 3).cast(dtype)
}
