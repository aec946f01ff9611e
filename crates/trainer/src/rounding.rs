//! [`Noise`]: stochastic rounding to bf16 on the device. The random bits depend only on a seed, a
//! step, a name and a position.
//!
//! ```text
//! round(x)      the upper 16 bits of bits(x) + r          r uniform in 0..65536
//! r[i, j, ..] = k_0[i] ⊕ k_1[j] ⊕ ..                      k_a: 16 random bits for each place along axis a
//! ```
//! A bf16 value is unchanged; other values are rounded without bias. The bits of any two elements,
//! and of two steps, are independent, as needed for the variance of sums over elements. A shard
//! draws the bits of its rows, so it is rounded like the whole tensor.
//!
//! Burn has no operation on the bits of a float. [`Noise::round`] finds both neighbours by rounding
//! to nearest, in exact steps.

use std::ops::Range;

use burn::tensor::backend::Backend;
use burn::tensor::{DType, FloatDType, Int, Tensor, TensorData};

use crate::rng::Rng;

/// Slightly more than half of the largest relative distance between adjacent bf16 values. Adding it
/// to a bf16 and rounding to nearest gives the next value away from zero; subtracting it gives the
/// next one towards zero.
const TO_NEIGHBOUR: f64 = 1.0 / 256.0 + 1.0 / 65536.0;

/// Random bits for rounding a tensor.
#[derive(Clone, Copy, Debug)]
pub struct Noise<'a> {
    /// Seed of the run.
    pub seed: u64,
    /// Steps completed before.
    pub step: usize,
    /// Name of the tensor.
    pub name: &'a str,
    /// First column of the tensor in the whole one.
    pub first_column: usize,
}

impl Noise<'_> {
    /// 16 bits per position for positions along an axis.
    pub fn keys(&self, axis: usize, places: Range<usize>) -> Vec<u16> {
        let Self { seed, step, name, .. } = self;
        let mut rng = Rng::named(*seed, &format!("rounding/{step}/{name}/{axis}")).after(places.start as u64);
        places.map(|_| (rng.next_u64() >> 48) as u16).collect()
    }

    /// Bits for each axis of a tensor. Its rows are the rows of the whole tensor from `first_row`
    /// on.
    pub fn all_keys<const D: usize>(&self, dims: [usize; D], first_row: usize) -> Vec<Vec<u16>> {
        let first = |axis| [first_row, self.first_column].get(axis).copied().unwrap_or(0);
        (0..D).map(|axis| self.keys(axis, first(axis)..first(axis) + dims[axis])).collect()
    }

    /// Rounds rows of an f32 tensor to bf16, starting at row `first_row` of the whole tensor.
    ///
    /// Values below the smallest normal number are rounded to nearest. Values that are not finite
    /// are unchanged.
    pub fn round<B: Backend, const D: usize>(&self, x: Tensor<B, D>, first_row: usize) -> Tensor<B, D> {
        let nearest = in_bf16(x.clone());
        let rest = x - nearest.clone();
        let direction = rest.clone().sign();
        let other = in_bf16(nearest.clone() + nearest.clone().abs().mul_scalar(TO_NEIGHBOUR) * direction.clone());
        // Distance of x from the nearest value towards the other one, in 65536ths; NaN if x is the
        // nearest value.
        let parts = (rest / (other.clone() - nearest.clone())).mul_scalar(65536.0);
        // With r - 32767.5 instead of r, both cases are one. Away from zero, the other value is
        // taken if parts + r >= 65536. Towards zero, the nearest value is taken if (65536 - parts)
        // + r >= 65536.
        let away_from_zero = direction * nearest.clone().sign();
        let centered = self.bits(nearest.dims(), first_row, &nearest.device()).sub_scalar(32767.5);
        let takes_other = (parts + away_from_zero * centered).greater_elem(32767.5);
        nearest.mask_where(takes_other, other).cast(DType::BF16)
    }

    /// r of each element, in f32.
    fn bits<B: Backend, const D: usize>(&self, dims: [usize; D], first_row: usize, device: &B::Device) -> Tensor<B, D> {
        let keys = self.all_keys(dims, first_row);
        let along = |axis: usize| {
            let keys: Vec<_> = keys[axis].iter().copied().map(i32::from).collect();
            let mut shape = [1; D];
            shape[axis] = dims[axis];
            let keys = Tensor::<B, 1, Int>::from_data(TensorData::new(keys, [dims[axis]]), device);
            keys.reshape(shape).expand(dims)
        };
        let bits = (1..D).fold(along(0), |bits, axis| bits.bitwise_xor(along(axis)));
        bits.cast(FloatDType::F32)
    }
}

/// Nearest bf16, in f32.
fn in_bf16<B: Backend, const D: usize>(x: Tensor<B, D>) -> Tensor<B, D> {
    x.cast(DType::BF16).cast(DType::F32)
}
