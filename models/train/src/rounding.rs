//! [`Noise`]: stochastic rounding to bf16 on the device, with random bits that depend on a seed, a step, a name and a place alone.
//!
//! ```text
//! round(x)      the upper 16 bits of bits(x) + r          r uniform in 0..65536
//! r[i, j, ..] = k_0[i] ⊕ k_1[j] ⊕ ..                      k_a: 16 random bits for each place along axis a
//! ```
//! A value that bf16 has stays, and the mean of what becomes of any other is that value. The bits of any two elements are independent,
//! as the variance of sums over elements asks for, and so are those of two steps. A shard draws the bits of its own rows, so it is
//! rounded as the whole is.
//!
//! Burn has no operation on the bits of a float: [`Noise::round`] finds both neighbours by rounding to nearest, in steps that are exact.

use std::ops::Range;

use burn::tensor::backend::Backend;
use burn::tensor::{DType, FloatDType, Int, Tensor, TensorData, bf16};

use crate::rng::Rng;

/// A little more than half of the largest distance, relative to a bf16, of the next one: added to a bf16 and rounded to nearest, it
/// gives the next one away from zero; taken away, the next one towards zero.
const TO_NEIGHBOUR: f64 = 1.0 / 256.0 + 1.0 / 65536.0;

/// Which random bits a tensor is rounded with.
#[derive(Clone, Copy, Debug)]
pub struct Noise<'a> {
    /// The run's seed.
    pub seed: u64,
    /// Steps made before.
    pub step: usize,
    /// The tensor.
    pub name: &'a str,
}

impl Noise<'_> {
    /// The 16 bits of some places along an axis.
    pub fn keys(&self, axis: usize, places: Range<usize>) -> Vec<u16> {
        let Self { seed, step, name } = self;
        let mut rng = Rng::named(*seed, &format!("rounding/{step}/{name}/{axis}")).after(places.start as u64);
        places.map(|_| (rng.next_u64() >> 48) as u16).collect()
    }

    /// The bits of the places of a tensor along each of its axes. Its rows are those of the whole tensor from `first_row` on.
    pub fn all_keys<const D: usize>(&self, dims: [usize; D], first_row: usize) -> Vec<Vec<u16>> {
        let first = |axis| if axis == 0 { first_row } else { 0 };
        (0..D).map(|axis| self.keys(axis, first(axis)..first(axis) + dims[axis])).collect()
    }

    /// A tensor in f32, rounded to bf16. Its rows are those of the whole tensor from `first_row` on.
    ///
    /// What is smaller than the smallest normal number is rounded to nearest; a number that is not finite stays.
    pub fn round<B: Backend, const D: usize>(&self, x: Tensor<B, D>, first_row: usize) -> Tensor<B, D> {
        let nearest = in_bf16(x.clone());
        let rest = x - nearest.clone();
        let direction = rest.clone().sign();
        let other = in_bf16(nearest.clone() + nearest.clone().abs().mul_scalar(TO_NEIGHBOUR) * direction.clone());
        // How far x is from the nearest towards the other, of 65536 parts; not a number where it is the nearest.
        let parts = (rest / (other.clone() - nearest.clone())).mul_scalar(65536.0);
        // With r - 32767.5 in place of r, both cases are one: away from zero the other is taken if parts + r >= 65536, and towards zero
        // the nearest is taken if (65536 - parts) + r >= 65536.
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

/// The nearest bf16, in f32.
fn in_bf16<B: Backend, const D: usize>(x: Tensor<B, D>) -> Tensor<B, D> {
    x.cast(DType::BF16).cast(DType::F32)
}

/// What [`Noise::round`] makes of a finite, normal number with the random bits `r`.
pub fn round_scalar(x: f32, r: u16) -> bf16 {
    bf16::from_bits(((x.to_bits() + u32::from(r)) >> 16) as u16)
}
