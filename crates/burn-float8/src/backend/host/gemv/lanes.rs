//! [`Lanes`]: sixteen outputs at a time, in the registers of a processor.

use float8_kernels::{Format, reference};

use super::{GROUP, LANES, Weight};

/// Sums of the outputs from one on, for x in groups.
pub(super) type Kernel = fn(&[f32], &Weight<'_>, usize, &mut [f32]);

/// A vector of f32. All operations round as IEEE's.
pub(super) trait Lanes: Copy + Default {
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

/// Of processors with AVX2, FMA and conversions of f16: an FP8 code is an f16 with other bits in front.
#[cfg(target_arch = "x86_64")]
pub(super) mod x86 {
    use core::arch::x86_64::*;
    use core::mem::transmute;

    use super::super::{Weight, band};
    use super::{Format, GROUP, Kernel, LANES, Lanes};

    /// The kernel, if the processor has what it takes.
    pub(in super::super) fn kernel<const M: usize>(format: Format, is_scaled: bool) -> Option<Kernel> {
        let has = is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c");
        has.then_some(match (format, is_scaled) {
            (Format::E4m3, false) => safe::<false, M, false>,
            (Format::E4m3, true) => safe::<false, M, true>,
            (Format::E5m2, false) => safe::<true, M, false>,
            (Format::E5m2, true) => safe::<true, M, true>,
        })
    }

    fn safe<const IS_E5M2: bool, const M: usize, const SCALED: bool>(
        x: &[f32],
        weight: &Weight<'_>,
        first: usize,
        y: &mut [f32],
    ) {
        // SAFETY: `kernel`, which alone gives it away, has asked the processor.
        unsafe { vectors::<IS_E5M2, M, SCALED>(x, weight, first, y) }
    }

    #[target_feature(enable = "avx2,fma,f16c")]
    fn vectors<const IS_E5M2: bool, const M: usize, const SCALED: bool>(
        x: &[f32],
        weight: &Weight<'_>,
        first: usize,
        y: &mut [f32],
    ) {
        band::<Avx2<IS_E5M2>, M, SCALED>(x, weight, first, y);
    }

    #[derive(Clone, Copy)]
    struct Avx2<const IS_E5M2: bool>([__m256; 2]);

    impl<const IS_E5M2: bool> Default for Avx2<IS_E5M2> {
        #[inline(always)]
        fn default() -> Self {
            // SAFETY: as for all below, `vectors` alone uses this type, in which the processor's features are known.
            unsafe { Self([_mm256_setzero_ps(); 2]) }
        }
    }

    impl<const IS_E5M2: bool> Lanes for Avx2<IS_E5M2> {
        #[inline(always)]
        fn decode(codes: [u8; LANES]) -> Self {
            // SAFETY: as above.
            unsafe {
                let high = _mm256_slli_epi16::<8>(_mm256_cvtepu8_epi16(transmute::<[u8; 16], __m128i>(codes)));
                let halves = match IS_E5M2 {
                    true => high,
                    // The sign, a zero before the four bits of the exponent, three of the mantissa.
                    false => _mm256_and_si256(_mm256_srai_epi16::<1>(high), _mm256_set1_epi16(0xbfff_u16 as i16)),
                };
                let low = _mm256_cvtph_ps(_mm256_castsi256_si128(halves));
                Self([low, _mm256_cvtph_ps(_mm256_extracti128_si256::<1>(halves))])
            }
        }

        #[inline(always)]
        fn load(values: &[f32; LANES]) -> Self {
            // SAFETY: as above; sixteen f32 are two vectors, whatever their alignment.
            unsafe { Self([_mm256_loadu_ps(values.as_ptr()), _mm256_loadu_ps(values.as_ptr().add(8))]) }
        }

        #[inline(always)]
        fn store(self, values: &mut [f32; LANES]) {
            // SAFETY: as above.
            unsafe {
                _mm256_storeu_ps(values.as_mut_ptr(), self.0[0]);
                _mm256_storeu_ps(values.as_mut_ptr().add(8), self.0[1]);
            }
        }

        #[inline(always)]
        fn plus(self, other: Self) -> Self {
            // SAFETY: as above.
            unsafe { Self([_mm256_add_ps(self.0[0], other.0[0]), _mm256_add_ps(self.0[1], other.0[1])]) }
        }

        #[inline(always)]
        fn times(self, other: Self) -> Self {
            // SAFETY: as above.
            unsafe { Self([_mm256_mul_ps(self.0[0], other.0[0]), _mm256_mul_ps(self.0[1], other.0[1])]) }
        }

        #[inline(always)]
        fn scaled(self, factor: f32) -> Self {
            // SAFETY: as above.
            unsafe {
                let factor = _mm256_set1_ps(factor);
                Self([_mm256_mul_ps(self.0[0], factor), _mm256_mul_ps(self.0[1], factor)])
            }
        }

        #[inline(always)]
        fn scaled_plus(self, factor: f32, sum: Self) -> Self {
            // SAFETY: as above.
            unsafe {
                let factor = _mm256_set1_ps(factor);
                Self([_mm256_fmadd_ps(self.0[0], factor, sum.0[0]), _mm256_fmadd_ps(self.0[1], factor, sum.0[1])])
            }
        }

        #[inline(always)]
        fn prefetch(byte: *const u8) {
            // SAFETY: a prefetch of any address is no access.
            unsafe { _mm_prefetch::<_MM_HINT_T0>(byte.cast()) }
        }

        #[inline(always)]
        fn transpose(codes: &[[u8; GROUP]; LANES]) -> [[u8; LANES]; GROUP] {
            // SAFETY: as above; both are sixteen vectors of sixteen bytes.
            unsafe {
                let mut rows: [__m128i; 16] = transmute(*codes);
                // Row i with row i + 8, four times: the bits of a byte's place go round by one each time.
                for _ in 0..4 {
                    let was = rows;
                    for i in 0..8 {
                        rows[2 * i] = _mm_unpacklo_epi8(was[i], was[i + 8]);
                        rows[2 * i + 1] = _mm_unpackhi_epi8(was[i], was[i + 8]);
                    }
                }
                transmute(rows)
            }
        }
    }
}
