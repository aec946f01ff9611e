//! The two 8-bit formats. Encode and decode on the device use integer arithmetic, so the bits do
//! not depend on how the device treats subnormals, NaN and fast math.

use core::fmt;

use cubecl::prelude::*;
use serde::{Deserialize, Serialize};

/// An 8-bit floating-point format: 1 sign bit, then exponent, then mantissa.
///
/// | | exponent, mantissa | bias | max | smallest subnormal | inf | NaN |
/// | --- | --- | --- | --- | --- | --- | --- |
/// | [`E4m3`](Format::E4m3) | 4, 3 | 7 | 448 | 2⁻⁹ | none | `0x7f`, `0xff` |
/// | [`E5m2`](Format::E5m2) | 5, 2 | 15 | 57344 | 2⁻¹⁶ | `0x7c`, `0xfc` | `0x7d..=0x7f`, `0xfd..=0xff` |
///
/// Source: Micikevicius et al., *FP8 Formats for Deep Learning* (2022), and the OCP OFP8
/// specification.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[cfg_attr(feature = "schemars", derive(schemars::JsonSchema))]
pub enum Format {
    /// OFP8 E4M3: finite only, torch's `float8_e4m3fn`.
    E4m3,
    /// OFP8 E5M2: IEEE-like, torch's `float8_e5m2`.
    E5m2,
}

/// Code that casts write for any NaN: every bit set except the sign, in both formats.
pub(crate) const NAN_CODE: u32 = 0x7f;

/// Bits of f32 infinity. Magnitudes above it are NaN.
pub(crate) const F32_INF: u32 = 0x7f80_0000;

/// Canonical NaN of the kernels' f32 results.
pub(crate) const F32_NAN: u32 = 0x7fc0_0000;

impl Format {
    /// Both formats.
    pub const ALL: [Self; 2] = [Self::E4m3, Self::E5m2];

    /// Largest finite value: 448 for E4M3, 57344 for E5M2.
    pub const fn max(self) -> f32 {
        match self {
            Format::E4m3 => 448.0,
            Format::E5m2 => 57344.0,
        }
    }

    /// Number of mantissa bits.
    pub const fn mantissa_bits(self) -> u32 {
        match self {
            Format::E4m3 => 3,
            Format::E5m2 => 2,
        }
    }

    /// Exponent bias.
    pub const fn bias(self) -> u32 {
        match self {
            Format::E4m3 => 7,
            Format::E5m2 => 15,
        }
    }

    /// Code of [`max`](Format::max): `0x7e` or `0x7b`.
    pub const fn max_code(self) -> u8 {
        match self {
            Format::E4m3 => 0x7e,
            Format::E5m2 => 0x7b,
        }
    }

    /// Biased f32 exponent of the smallest normal value, `2^(1 - bias)`.
    pub(crate) const fn min_normal_exponent(self) -> u32 {
        127 + 1 - self.bias()
    }

    /// f32 value of one subnormal step, `2^(1 - bias - mantissa bits)`.
    pub(crate) const fn subnormal_step(self) -> f32 {
        f32::from_bits((self.min_normal_exponent() - self.mantissa_bits()) << 23)
    }
}

impl fmt::Display for Format {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The same names as in configuration files.
        self.serialize(f)
    }
}

/// Code of `x · scale` for the bits of an f32 `x`: rounded to nearest even, saturating. NaN gives
/// [`NAN_CODE`]. `nan_by_scale` promises that `x` is NaN only if `scale` is. One test of the scale
/// then serves all elements that share it.
///
/// The sign, infinity and NaN are read from the bits of `x`. So only finite products and sums
/// depend on the device, and WGSL requires their correct rounding. A subnormal operand or product
/// may be flushed. Both encode to a zero with the sign of `x` anyway, because a scale is at most
/// 57344 / 1e-12 and the smallest code is 2⁻¹⁶.
#[cube]
pub(crate) fn encode_scaled(x: u32, scale: f32, #[comptime] nan_by_scale: bool, #[comptime] format: Format) -> u32 {
    let sign = (x >> 24u32) & 0x80u32;
    let mag = x & 0x7fff_ffffu32;
    let product = u32::reinterpret(f32::reinterpret(mag) * scale);
    let product = select(mag == F32_INF, F32_INF.runtime(), product);
    let code = encode_magnitude(product, format);
    let scale_mag = u32::reinterpret(scale) & 0x7fff_ffffu32;
    let is_nan = if comptime!(nan_by_scale) { scale_mag > F32_INF } else { max(mag, scale_mag) > F32_INF };
    select(is_nan, NAN_CODE.runtime(), sign | code)
}

/// Code of a non-negative f32 given by its bits. Anything from `max` up, including infinity, gives
/// the largest code.
///
/// ```text
/// e = max(exponent of |x|, exponent of the smallest normal)
/// u = 2^(e + 23 - mantissa bits), the power of two whose ulp is a step of codes at e
/// significand = ((|x| + u) - u) / ulp(u), rounded by the addition
/// code = (e - exponent of the smallest normal) · 2^mantissa bits + significand
/// ```
/// The significand of a normal includes its leading one, which supplies the exponent field of 1 at
/// the smallest normal. If it rounds up to the next power of two, the carry raises the exponent.
#[cube]
fn encode_magnitude(abs: u32, #[comptime] format: Format) -> u32 {
    let drop = comptime!(23 - format.mantissa_bits());
    let smallest = comptime!(format.min_normal_exponent() << 23);
    let abs = min(abs, comptime!(format.max().to_bits()));
    let exponent = max(abs & 0x7f80_0000u32, smallest);
    let unit = exponent + comptime!(drop << 23);
    let sum = u32::reinterpret(f32::reinterpret(abs) + f32::reinterpret(unit));
    ((exponent - smallest) >> drop) + (sum - unit)
}

/// Value of the code in the low byte of `code`, whose higher bits must be zero.
#[cube]
pub(crate) fn decode(code: u32, #[comptime] format: Format) -> f32 {
    let mantissa = comptime!(format.mantissa_bits());
    let sign = (code & 0x80u32) << 24u32;
    let mag = code & 0x7fu32;
    let normal = (mag << comptime!(23 - mantissa)) + comptime!((127 - format.bias()) << 23);
    // Exact, and a normal f32: the smallest is 2^-16.
    let sub = u32::reinterpret(f32::cast_from(mag) * comptime!(format.subnormal_step()));
    let finite = select(mag < comptime!(1u32 << mantissa), sub, normal);
    let bits = if comptime!(matches!(format, Format::E4m3)) {
        select(mag == NAN_CODE, F32_NAN.runtime(), finite)
    } else {
        let or_inf = select(mag == 0x7cu32, F32_INF.runtime(), finite);
        select(mag > 0x7cu32, F32_NAN.runtime(), or_inf)
    };
    f32::reinterpret(bits | sign)
}
