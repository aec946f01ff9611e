//! [`Lanes`]: sixteen outputs at a time, in the registers of a processor.

use float8_kernels::{Format, reference};

use super::{BLOCK, GROUP, LANES, Weight};

/// Sums of the outputs from one on, for x in groups.
pub(super) type Kernel = fn(&[f32], &Weight<'_>, usize, &mut [f32]);

/// A vector of f32. All operations round as IEEE's.
///
/// Several of them hold codes that lie side by side, in an order that [`decode`](Self::decode) and [`add`](Self::add) share.
pub(super) trait Lanes: Copy + Default {
    /// Whether there are registers for four vectors of several rows.
    const ARE_MANY: bool = false;

    /// The values of codes; of e4m3 divided by 256, of which no code is a NaN.
    fn decode<const V: usize>(codes: &[[u8; LANES]; V]) -> [Self; V];
    /// `values + sums · factors`, rounded once.
    fn add<const V: usize>(sums: [Self; V], factors: Option<&[[f32; LANES]; V]>, values: &mut [[f32; LANES]; V]);
    fn scaled(self, factor: f32) -> Self;
    /// `self · factor + sum`, rounded once.
    fn scaled_plus(self, factor: f32, sum: Self) -> Self;

    /// A byte that will be read soon; it need not be there.
    #[inline(always)]
    fn prefetch(_: *const u8) {}

    /// The columns of a group, from one on.
    #[inline(always)]
    fn transpose(codes: &[[u8; BLOCK]; BLOCK], first: usize) -> [[u8; BLOCK]; GROUP] {
        core::array::from_fn(|column| core::array::from_fn(|row| codes[row][first + column]))
    }
}

/// Any processor's.
#[derive(Clone, Copy, Default)]
pub(super) struct Portable<const IS_E5M2: bool>([f32; LANES]);

impl<const IS_E5M2: bool> Lanes for Portable<IS_E5M2> {
    #[inline(always)]
    fn decode<const V: usize>(codes: &[[u8; LANES]; V]) -> [Self; V] {
        let decode = |code| match IS_E5M2 {
            true => reference::decode(code, Format::E5m2),
            false => reference::decode(code, Format::E4m3) / 256.0,
        };
        codes.map(|codes| Self(codes.map(decode)))
    }

    #[inline(always)]
    fn add<const V: usize>(sums: [Self; V], factors: Option<&[[f32; LANES]; V]>, values: &mut [[f32; LANES]; V]) {
        for (v, (values, sums)) in values.iter_mut().zip(sums).enumerate() {
            for (i, (value, sum)) in values.iter_mut().zip(sums.0).enumerate() {
                *value = match factors {
                    Some(factors) => sum.mul_add(factors[v][i], *value),
                    None => *value + sum,
                };
            }
        }
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
