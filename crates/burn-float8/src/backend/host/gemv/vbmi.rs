//! [`Lanes`] of x86 processors with AVX-512 VBMI, which look up the bytes of 64 codes at a time: an FP8 value is a bf16, the half of an f32.

use core::arch::x86_64::*;
use core::mem::transmute;

use super::lanes::Lanes;
use super::{BLOCK, GROUP, LANES};

/// The low and the high bytes of the bf16 of each code without its sign; of e4m3 divided by 256.
struct Tables([[u8; 128]; 2]);

impl Tables {
    const fn new(is_e5m2: bool) -> Self {
        // A normal code is `(1 + fraction / 2^bits) · 2^(exponent - bias)`.
        let (bits, bias): (u32, i32) = if is_e5m2 { (2, 15) } else { (3, 7 + 8) };
        let mut bytes = [[0; 128]; 2];
        let mut code = 1;
        while code < 128 {
            let (exponent, fraction) = ((code as u32 >> bits) as i32, code as u32 % (1 << bits));
            let (power, fraction) = if exponent == 0 {
                // Its first bit is the one before the point.
                let shift = bits - fraction.ilog2();
                (1 - bias - shift as i32, (fraction << shift) % (1 << bits))
            } else {
                (exponent - bias, fraction)
            };
            let is_special = is_e5m2 && exponent == 31;
            let exponent = if is_special { 255 } else { (power + 127) as u32 };
            let value = exponent << 7 | fraction << (7 - bits);
            bytes[0][code] = value as u8;
            bytes[1][code] = (value >> 8) as u8;
            code += 1;
        }
        Self(bytes)
    }

    const E4M3: Self = Self::new(false);
    const E5M2: Self = Self::new(true);
}

#[inline(always)]
pub(super) fn prefetch(byte: *const u8) {
    // Into L2, which can wait for more cache lines at a time than L1.
    // SAFETY: to prefetch any address is no access.
    unsafe { _mm_prefetch::<_MM_HINT_T1>(byte.cast()) }
}

/// What [`Lanes`] of one `__m512` have in common, whatever decodes their codes.
macro_rules! arithmetic_512 {
    () => {
        #[inline(always)]
        fn scaled(self, factor: f32) -> Self {
            // SAFETY: as above.
            unsafe { Self(_mm512_mul_ps(self.0, _mm512_set1_ps(factor))) }
        }

        #[inline(always)]
        fn scaled_plus(self, factor: f32, sum: Self) -> Self {
            // SAFETY: as above.
            unsafe { Self(_mm512_fmadd_ps(self.0, _mm512_set1_ps(factor), sum.0)) }
        }

        #[inline(always)]
        fn prefetch(byte: *const u8) {
            prefetch(byte);
        }
    };
}
pub(super) use arithmetic_512;

/// [`Lanes::add`] of one vector.
///
/// # Safety
/// The processor has AVX-512F.
#[inline(always)]
pub(super) unsafe fn add_512(sum: __m512, factors: Option<&[f32; LANES]>, values: &mut [f32; LANES]) {
    // SAFETY: the caller's; sixteen f32 are a vector, whatever their alignment.
    unsafe {
        let old = _mm512_loadu_ps(values.as_ptr());
        let new = match factors {
            Some(factors) => _mm512_fmadd_ps(sum, _mm512_loadu_ps(factors.as_ptr()), old),
            None => _mm512_add_ps(old, sum),
        };
        _mm512_storeu_ps(values.as_mut_ptr(), new);
    }
}

/// Sixteen f32.
#[derive(Clone, Copy)]
pub(super) struct Vbmi<const IS_E5M2: bool>(__m512);

impl<const IS_E5M2: bool> Default for Vbmi<IS_E5M2> {
    #[inline(always)]
    fn default() -> Self {
        // SAFETY: as for all below, `in_vbmi` alone uses this type, where the processor has AVX-512F, BW and VBMI.
        unsafe { Self(_mm512_setzero_ps()) }
    }
}

/// Four vectors as four rows of four parts each, and the rows as columns.
///
/// # Safety
/// The processor has AVX-512F.
#[inline(always)]
unsafe fn parts_transposed([a, b, c, d]: [__m512; 4]) -> [__m512; 4] {
    // SAFETY: the caller's.
    unsafe {
        let (low_ab, high_ab) = (_mm512_shuffle_f32x4::<0x44>(a, b), _mm512_shuffle_f32x4::<0xee>(a, b));
        let (low_cd, high_cd) = (_mm512_shuffle_f32x4::<0x44>(c, d), _mm512_shuffle_f32x4::<0xee>(c, d));
        [
            _mm512_shuffle_f32x4::<0x88>(low_ab, low_cd),
            _mm512_shuffle_f32x4::<0xdd>(low_ab, low_cd),
            _mm512_shuffle_f32x4::<0x88>(high_ab, high_cd),
            _mm512_shuffle_f32x4::<0xdd>(high_ab, high_cd),
        ]
    }
}

/// Half of a table.
///
/// # Safety
/// The processor has AVX-512F.
#[inline(always)]
unsafe fn half(table: &[u8; 128], which: usize) -> __m512i {
    // SAFETY: the caller's; 64 bytes are a vector, whatever their alignment.
    unsafe { _mm512_loadu_si512(table[64 * which..][..64].as_ptr().cast()) }
}

impl<const IS_E5M2: bool> Lanes for Vbmi<IS_E5M2> {
    const ARE_MANY: bool = true;

    // Loops and no closures: a function of the standard library that calls one is compiled without these instructions.

    /// Of each 16 codes the vectors have, in turn, the even and the odd ones of the first eight, and of the last eight.
    #[inline(always)]
    fn decode<const V: usize>(codes: &[[u8; LANES]; V]) -> [Self; V] {
        assert!(V == 4, "a block");
        let tables = const { if IS_E5M2 { &Tables::E5M2.0 } else { &Tables::E4M3.0 } };
        // SAFETY: as above; four vectors of codes and half a table are 64 bytes, whatever their alignment.
        let vectors = unsafe {
            let codes = _mm512_loadu_si512(codes.as_ptr().cast());
            let low = _mm512_permutex2var_epi8(half(&tables[0], 0), codes, half(&tables[0], 1));
            let high = _mm512_permutex2var_epi8(half(&tables[1], 0), codes, half(&tables[1], 1));
            // The code's sign beside it: high | (codes & 0x80).
            let high = _mm512_ternarylogic_epi32::<0xf8>(high, codes, _mm512_set1_epi8(i8::MIN));
            let (first, last) = (_mm512_unpacklo_epi8(low, high), _mm512_unpackhi_epi8(low, high));
            let upper = _mm512_set1_epi32(0xffff_0000_u32 as i32);
            [
                _mm512_slli_epi32::<16>(first),
                _mm512_and_si512(first, upper),
                _mm512_slli_epi32::<16>(last),
                _mm512_and_si512(last, upper),
            ]
        };
        let mut of_codes = [Self::default(); V];
        for (lanes, vector) in of_codes.iter_mut().zip(vectors) {
            // SAFETY: as above.
            *lanes = Self(unsafe { _mm512_castsi512_ps(vector) });
        }
        of_codes
    }

    #[inline(always)]
    fn add<const V: usize>(sums: [Self; V], factors: Option<&[[f32; LANES]; V]>, values: &mut [[f32; LANES]; V]) {
        assert!(V == 4, "a block");
        // SAFETY: as above.
        unsafe {
            let parts = [
                _mm512_unpacklo_ps(sums[0].0, sums[1].0),
                _mm512_unpackhi_ps(sums[0].0, sums[1].0),
                _mm512_unpacklo_ps(sums[2].0, sums[3].0),
                _mm512_unpackhi_ps(sums[2].0, sums[3].0),
            ];
            for (v, (values, sum)) in values.iter_mut().zip(parts_transposed(parts)).enumerate() {
                add_512(sum, factors.map(|factors| &factors[v]), values);
            }
        }
    }

    arithmetic_512!();

    /// Byte by byte with neighbours four times, four rows that are 16 apart in each vector.
    #[inline(always)]
    fn transpose(codes: &[[u8; BLOCK]; BLOCK], first: usize) -> [[u8; BLOCK]; GROUP] {
        // SAFETY: as above; sixteen bytes are a quarter of a vector.
        unsafe {
            let mut rows = [_mm512_setzero_si512(); GROUP];
            for (i, rows) in rows.iter_mut().enumerate() {
                let first_of = |part: usize| codes[i + part * LANES][first..][..GROUP].as_ptr().cast();
                *rows = _mm512_castsi128_si512(_mm_loadu_si128(first_of(0)));
                *rows = _mm512_inserti32x4::<1>(*rows, _mm_loadu_si128(first_of(1)));
                *rows = _mm512_inserti32x4::<2>(*rows, _mm_loadu_si128(first_of(2)));
                *rows = _mm512_inserti32x4::<3>(*rows, _mm_loadu_si128(first_of(3)));
            }
            for _ in 0..4 {
                let was = rows;
                for i in 0..LANES / 2 {
                    rows[2 * i] = _mm512_unpacklo_epi8(was[i], was[i + LANES / 2]);
                    rows[2 * i + 1] = _mm512_unpackhi_epi8(was[i], was[i + LANES / 2]);
                }
            }
            transmute(rows)
        }
    }
}
