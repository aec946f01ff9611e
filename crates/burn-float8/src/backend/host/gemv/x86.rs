//! [`Lanes`] of x86 processors: an FP8 code is an f16 with other bits in front, which they convert.

use core::arch::x86_64::*;
use core::mem::transmute;

use float8_kernels::Format;

use super::lanes::{Kernel, Lanes};
use super::vbmi::{Vbmi, add_512, arithmetic_512, prefetch};
use super::{BLOCK, GROUP, LANES, Weight, band};

/// The kernel, if the processor has what it takes.
pub(super) fn kernel<const M: usize>(format: Format, is_scaled: bool) -> Option<Kernel> {
    let has = is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c");
    let is_wide = has && is_x86_feature_detected!("avx512f");
    if is_wide && is_x86_feature_detected!("avx512bw") && is_x86_feature_detected!("avx512vbmi") {
        return Some(match (format, is_scaled) {
            (Format::E4m3, false) => in_vbmi::<false, M, false>,
            (Format::E4m3, true) => in_vbmi::<false, M, true>,
            (Format::E5m2, false) => in_vbmi::<true, M, false>,
            (Format::E5m2, true) => in_vbmi::<true, M, true>,
        });
    }
    has.then_some(match (format, is_scaled, is_wide) {
        (Format::E4m3, false, false) => in_avx2::<false, M, false>,
        (Format::E4m3, true, false) => in_avx2::<false, M, true>,
        (Format::E5m2, false, false) => in_avx2::<true, M, false>,
        (Format::E5m2, true, false) => in_avx2::<true, M, true>,
        (Format::E4m3, false, true) => in_avx512::<false, M, false>,
        (Format::E4m3, true, true) => in_avx512::<false, M, true>,
        (Format::E5m2, false, true) => in_avx512::<true, M, false>,
        (Format::E5m2, true, true) => in_avx512::<true, M, true>,
    })
}

/// The kernels of processors that have less, of codes in e4m3.
#[cfg(test)]
pub(super) fn older<const M: usize>(is_scaled: bool) -> impl Iterator<Item = Kernel> {
    let has = is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c");
    let narrow: Kernel = if is_scaled { in_avx2::<false, M, true> } else { in_avx2::<false, M, false> };
    let wide: Kernel = if is_scaled { in_avx512::<false, M, true> } else { in_avx512::<false, M, false> };
    let has_wide = has && is_x86_feature_detected!("avx512f");
    has.then_some(narrow).into_iter().chain(has_wide.then_some(wide))
}

fn in_avx2<const IS_E5M2: bool, const M: usize, const SCALED: bool>(
    x: &[f32],
    weight: &Weight<'_>,
    first: usize,
    y: &mut [f32],
) {
    #[target_feature(enable = "avx2,fma,f16c")]
    fn run<const IS_E5M2: bool, const M: usize, const SCALED: bool>(
        x: &[f32],
        weight: &Weight<'_>,
        first: usize,
        y: &mut [f32],
    ) {
        band::<Avx2<IS_E5M2>, M, SCALED>(x, weight, first, y);
    }
    // SAFETY: `kernel` and `older`, which alone give it away, have asked the processor.
    unsafe { run::<IS_E5M2, M, SCALED>(x, weight, first, y) }
}

fn in_avx512<const IS_E5M2: bool, const M: usize, const SCALED: bool>(
    x: &[f32],
    weight: &Weight<'_>,
    first: usize,
    y: &mut [f32],
) {
    #[target_feature(enable = "avx2,fma,f16c,avx512f")]
    fn run<const IS_E5M2: bool, const M: usize, const SCALED: bool>(
        x: &[f32],
        weight: &Weight<'_>,
        first: usize,
        y: &mut [f32],
    ) {
        band::<Avx512<IS_E5M2>, M, SCALED>(x, weight, first, y);
    }
    // SAFETY: `kernel` and `older`, which alone give it away, have asked the processor.
    unsafe { run::<IS_E5M2, M, SCALED>(x, weight, first, y) }
}

fn in_vbmi<const IS_E5M2: bool, const M: usize, const SCALED: bool>(
    x: &[f32],
    weight: &Weight<'_>,
    first: usize,
    y: &mut [f32],
) {
    #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vbmi")]
    fn run<const IS_E5M2: bool, const M: usize, const SCALED: bool>(
        x: &[f32],
        weight: &Weight<'_>,
        first: usize,
        y: &mut [f32],
    ) {
        band::<Vbmi<IS_E5M2>, M, SCALED>(x, weight, first, y);
    }
    // SAFETY: `kernel`, which alone gives it away, has asked the processor.
    unsafe { run::<IS_E5M2, M, SCALED>(x, weight, first, y) }
}

/// Codes as f16, of e4m3 divided by 256.
///
/// # Safety
/// The processor has AVX2.
#[inline(always)]
unsafe fn halves<const IS_E5M2: bool>(codes: [u8; LANES]) -> __m256i {
    // SAFETY: the caller's; sixteen bytes are a vector.
    unsafe {
        let high = _mm256_slli_epi16::<8>(_mm256_cvtepu8_epi16(transmute::<[u8; LANES], __m128i>(codes)));
        match IS_E5M2 {
            true => high,
            // The sign, a zero before the four bits of the exponent, three of the mantissa.
            false => _mm256_and_si256(_mm256_srai_epi16::<1>(high), _mm256_set1_epi16(0xbfff_u16 as i16)),
        }
    }
}

#[inline(always)]
fn transpose(codes: &[[u8; BLOCK]; BLOCK], first: usize) -> [[u8; BLOCK]; GROUP] {
    let mut columns = [[0; BLOCK]; GROUP];
    for (v, codes) in codes.as_chunks::<LANES>().0.iter().enumerate() {
        // SAFETY: sixteen bytes are a vector, and every x86-64 has SSE2.
        let vectors: [[u8; LANES]; GROUP] = unsafe {
            let mut rows: [__m128i; 16] = codes.map(|row| _mm_loadu_si128(row[first..][..GROUP].as_ptr().cast()));
            // Row i with row i + 8, four times: the bits of a byte's place go round by one each time.
            for _ in 0..4 {
                let was = rows;
                for i in 0..8 {
                    rows[2 * i] = _mm_unpacklo_epi8(was[i], was[i + 8]);
                    rows[2 * i + 1] = _mm_unpackhi_epi8(was[i], was[i + 8]);
                }
            }
            transmute(rows)
        };
        columns.iter_mut().zip(vectors).for_each(|(column, part)| column[v * LANES..][..LANES].copy_from_slice(&part));
    }
    columns
}

/// Two vectors of eight.
#[derive(Clone, Copy)]
struct Avx2<const IS_E5M2: bool>([__m256; 2]);

impl<const IS_E5M2: bool> Default for Avx2<IS_E5M2> {
    #[inline(always)]
    fn default() -> Self {
        // SAFETY: as for all below, `in_avx2` alone uses this type, where the processor has AVX2, FMA and F16C.
        unsafe { Self([_mm256_setzero_ps(); 2]) }
    }
}

impl<const IS_E5M2: bool> Lanes for Avx2<IS_E5M2> {
    #[inline(always)]
    fn decode<const V: usize>(codes: &[[u8; LANES]; V]) -> [Self; V] {
        let mut values = [Self::default(); V];
        for (values, codes) in values.iter_mut().zip(codes) {
            // SAFETY: as above.
            unsafe {
                let halves = halves::<IS_E5M2>(*codes);
                values.0[0] = _mm256_cvtph_ps(_mm256_castsi256_si128(halves));
                values.0[1] = _mm256_cvtph_ps(_mm256_extracti128_si256::<1>(halves));
            }
        }
        values
    }

    #[inline(always)]
    fn add<const V: usize>(sums: [Self; V], factors: Option<&[[f32; LANES]; V]>, values: &mut [[f32; LANES]; V]) {
        for (v, (sum, values)) in sums.into_iter().zip(values).enumerate() {
            for (half, sum) in sum.0.into_iter().enumerate() {
                let values = &mut values[8 * half..][..8];
                // SAFETY: as above; eight f32 are a vector, whatever their alignment.
                unsafe {
                    let old = _mm256_loadu_ps(values.as_ptr());
                    let new = match factors {
                        Some(factors) => {
                            _mm256_fmadd_ps(sum, _mm256_loadu_ps(factors[v][8 * half..][..8].as_ptr()), old)
                        }
                        None => _mm256_add_ps(old, sum),
                    };
                    _mm256_storeu_ps(values.as_mut_ptr(), new);
                }
            }
        }
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
        prefetch(byte);
    }

    #[inline(always)]
    fn transpose(codes: &[[u8; BLOCK]; BLOCK], first: usize) -> [[u8; BLOCK]; GROUP] {
        transpose(codes, first)
    }
}

/// One vector of sixteen.
#[derive(Clone, Copy)]
struct Avx512<const IS_E5M2: bool>(__m512);

impl<const IS_E5M2: bool> Default for Avx512<IS_E5M2> {
    #[inline(always)]
    fn default() -> Self {
        // SAFETY: as for all below, `in_avx512` alone uses this type, where the processor has AVX-512F and what came before it.
        unsafe { Self(_mm512_setzero_ps()) }
    }
}

impl<const IS_E5M2: bool> Lanes for Avx512<IS_E5M2> {
    const ARE_MANY: bool = true;

    #[inline(always)]
    fn decode<const V: usize>(codes: &[[u8; LANES]; V]) -> [Self; V] {
        let mut values = [Self::default(); V];
        for (value, codes) in values.iter_mut().zip(codes) {
            // SAFETY: as above.
            unsafe { value.0 = _mm512_cvtph_ps(halves::<IS_E5M2>(*codes)) }
        }
        values
    }

    #[inline(always)]
    fn add<const V: usize>(sums: [Self; V], factors: Option<&[[f32; LANES]; V]>, values: &mut [[f32; LANES]; V]) {
        for (v, (sum, values)) in sums.into_iter().zip(values).enumerate() {
            // SAFETY: as above.
            unsafe { add_512(sum.0, factors.map(|factors| &factors[v]), values) }
        }
    }

    arithmetic_512!();

    #[inline(always)]
    fn transpose(codes: &[[u8; BLOCK]; BLOCK], first: usize) -> [[u8; BLOCK]; GROUP] {
        transpose(codes, first)
    }
}
