//! [`Lanes`]: sixteen outputs at a time, in the registers of a processor.

use float8_kernels::{Format, reference};

use super::{GROUP, LANES, Weight};

/// Sums of the outputs from one on, for x in groups.
pub(super) type Kernel = fn(&[f32], &Weight<'_>, usize, &mut [f32]);

/// A vector of f32. All operations round as IEEE's.
pub(super) trait Lanes: Copy + Default {
    /// Whether there are registers for four vectors of several rows.
    const ARE_MANY: bool = false;

    /// The values of codes; of e4m3 divided by 256, of which no code is a NaN.
    fn decode(codes: [u8; LANES]) -> Self;
    fn load(values: &[f32; LANES]) -> Self;
    fn store(self, values: &mut [f32; LANES]);
    fn plus(self, other: Self) -> Self;
    fn times(self, other: Self) -> Self;
    fn scaled(self, factor: f32) -> Self;
    /// `self · factor + sum`, rounded once.
    fn scaled_plus(self, factor: f32, sum: Self) -> Self;

    /// A byte that will be read soon; it need not be there.
    #[inline(always)]
    fn prefetch(_: *const u8) {}

    #[inline(always)]
    fn transpose(codes: &[[u8; GROUP]; LANES]) -> [[u8; LANES]; GROUP] {
        core::array::from_fn(|column| core::array::from_fn(|row| codes[row][column]))
    }
}

/// Any processor's.
#[derive(Clone, Copy, Default)]
pub(super) struct Portable<const IS_E5M2: bool>([f32; LANES]);

impl<const IS_E5M2: bool> Lanes for Portable<IS_E5M2> {
    #[inline(always)]
    fn decode(codes: [u8; LANES]) -> Self {
        Self(codes.map(|code| match IS_E5M2 {
            true => reference::decode(code, Format::E5m2),
            false => reference::decode(code, Format::E4m3) / 256.0,
        }))
    }

    #[inline(always)]
    fn load(values: &[f32; LANES]) -> Self {
        Self(*values)
    }

    #[inline(always)]
    fn store(self, values: &mut [f32; LANES]) {
        *values = self.0;
    }

    #[inline(always)]
    fn plus(self, other: Self) -> Self {
        Self(core::array::from_fn(|i| self.0[i] + other.0[i]))
    }

    #[inline(always)]
    fn times(self, other: Self) -> Self {
        Self(core::array::from_fn(|i| self.0[i] * other.0[i]))
    }

    #[inline(always)]
    fn scaled(self, factor: f32) -> Self {
        Self(self.0.map(|value| value * factor))
    }

    #[inline(always)]
    fn scaled_plus(self, factor: f32, sum: Self) -> Self {
        Self(core::array::from_fn(|i| self.0[i].mul_add(factor, sum.0[i])))
    }
}
