//! The kernels' results on the host, by loops over scalars: the oracle of the tests and the CPU
//! backend's cast.
//!
//! The loops are branch-free over slices, so that the compiler vectorizes them. They are compiled
//! for each vector extension that the machine may have.

use crate::format::{F32_INF, NAN_CODE};
use crate::mx::{amax_to_e8m0, e8m0_scale};
use crate::scale::MIN_AMAX;
use crate::{Format, Scale, ScaleMode};

/// Defines functions that are compiled for each vector extension. The best one of the machine runs.
/// All functions that they call must be `#[inline(always)]`: otherwise these are compiled once, for
/// the baseline.
macro_rules! vectorized {
    ($($(#[$meta:meta])* $vis:vis fn $name:ident($($arg:ident: $type:ty),* $(,)?) -> $out:ty $body:block)*) => { $(
        $(#[$meta])*
        $vis fn $name($($arg: $type),*) -> $out {
            struct Call<T>(T);
            impl pulp::WithSimd for Call<($($type,)*)> {
                type Output = $out;

                #[inline(always)]
                fn with_simd<S: pulp::Simd>(self, _: S) -> $out {
                    let Call(($($arg,)*)) = self;
                    $body
                }
            }
            pulp::Arch::new().dispatch(Call(($($arg,)*)))
        }
    )* };
}

/// Expands an expression once per format, so that the format is a constant in each.
macro_rules! for_each_format {
    ($format:ident => $result:expr) => {
        match $format {
            Format::E4m3 => {
                let $format = Format::E4m3;
                $result
            }
            Format::E5m2 => {
                let $format = Format::E5m2;
                $result
            }
        }
    };
}

pub mod adamw;
pub mod attention;
pub mod fused;
mod grouped;
mod health;
mod matrix;

pub use grouped::grouped_scaled_gemm_f64;
pub use health::health;
pub use matrix::{
    HostOperand, HostQuantized, cast_columns, column_amaxes, dequantize_into, dequantize_mx, matmul_f64, quantize,
    quantize_into, scaled_gemm_f64, transpose,
};

/// FP8 code of `x`, rounded to nearest even, saturating. In both formats, ±inf gives ±max, and any
/// NaN gives `0x7f`.
///
/// Subnormals use an addition that leaves the rounded code in the low bits of the sum. Normals use
/// integer rounding of the f32 bits.
#[inline(always)]
pub fn encode(x: f32, format: Format) -> u8 {
    // Signed integers, which the baseline vector instructions can compare. Magnitudes fit.
    let bits = x.to_bits();
    let sign = ((bits >> 24) & 0x80) as i32;
    let mag = (bits & 0x7fff_ffff) as i32;
    let drop = 23 - format.mantissa_bits() as i32;

    let magic = format.subnormal_step() * (1 << 23) as f32;
    let sub = (f32::from_bits(mag as u32) + magic).to_bits() as i32 - magic.to_bits() as i32;

    let odd = (mag >> drop) & 1;
    let rounded = mag.wrapping_add((1 << (drop - 1)) - 1 + odd) >> drop;
    let normal = rounded - ((127 - format.bias() as i32) << format.mantissa_bits());

    let is_sub = mag < (format.min_normal_exponent() as i32) << 23;
    let code = if is_sub { sub } else { normal };
    let max = i32::from(format.max_code());
    let code = if code > max { max } else { code };
    let code = if mag > F32_INF as i32 { NAN_CODE as i32 } else { code | sign };
    code as u8
}

/// Value of a code. E4M3 `0x7f` and `0xff` are NaN. E5M2 has infinities at `0x7c` and `0xfc` and
/// NaN above them.
///
/// Uses no table, as vector units have no fast look-up: normals by shifts, subnormals by a product.
#[inline(always)]
pub fn decode(code: u8, format: Format) -> f32 {
    let mag = i32::from(code & 0x7f);
    let normal = ((mag as u32) << (23 - format.mantissa_bits())) + ((127 - format.bias()) << 23);
    let subnormal = (mag as f32 * format.subnormal_step()).to_bits();
    let bits = if mag < 1 << format.mantissa_bits() { subnormal } else { normal };
    // Magnitude of infinity, or of NaN if there is no infinity.
    let special = if matches!(format, Format::E4m3) { 0x7f } else { 0x7c };
    let is_inf = matches!(format, Format::E5m2) && mag == special;
    let not_finite = if is_inf { F32_INF } else { f32::NAN.to_bits() };
    let bits = if mag >= special { not_finite } else { bits };
    f32::from_bits(bits | u32::from(code & 0x80) << 24)
}

vectorized! {
    /// `out[i] = decode(codes[i])`.
    ///
    /// # Panics
    /// If the slices differ in length.
    pub fn decode_slice(codes: &[u8], format: Format, out: &mut [f32]) -> () {
        assert_eq!(codes.len(), out.len(), "decode_slice: one value per code");
        for_each_format!(format => decode_each(codes, format, |_| 1.0, out))
    }

    /// `max |x|`, NaN if `x` contains one, 0 if `x` is empty.
    pub fn amax(x: &[f32]) -> f32 {
        from_magnitude(largest(x))
    }

    /// `out[i] = encode(x[i] · scale)`.
    ///
    /// A zero code keeps the sign of `x`.
    ///
    /// # Panics
    /// If `x` and `out` differ in length.
    pub fn cast(x: &[f32], scale: Scale, format: Format, out: &mut [u8]) -> () {
        assert_eq!(x.len(), out.len(), "cast: one code per element");
        cast_all(x, scale, format, out)
    }
}

/// `out[i] = decode(codes[i]) · scale(i)`.
#[inline(always)]
fn decode_each(codes: &[u8], format: Format, scale: impl Fn(usize) -> f32, out: &mut [f32]) {
    for (i, (value, &code)) in out.iter_mut().zip(codes).enumerate() {
        *value = decode(code, format) * scale(i);
    }
}

/// Bits of |x|. Magnitudes order like their bits, with NaN on top.
#[inline(always)]
fn magnitude(x: f32) -> i32 {
    (x.to_bits() & 0x7fff_ffff) as i32
}

#[inline(always)]
fn larger(a: i32, b: i32) -> i32 {
    if a > b { a } else { b }
}

#[inline(always)]
fn largest(x: &[f32]) -> i32 {
    x.iter().fold(0, |largest, &x| larger(largest, magnitude(x)))
}

/// Value of the bits of a magnitude. Every NaN becomes the canonical one.
fn from_magnitude(bits: i32) -> f32 {
    if bits > F32_INF as i32 { f32::NAN } else { f32::from_bits(bits as u32) }
}

/// `scale = f32(FMAX / max(f64(amax), 1e-12))`, as torchao's `amax_to_scale`, rounded down to a
/// power of two if `mode` is [`ScaleMode::PowerOfTwo`].
///
/// A NaN amax gives a NaN scale. An infinite one counts as `f32::MAX`, so that the scale stays
/// positive and an infinity saturates instead of becoming `inf · 0 = NaN`. [`ScaleMode::E8m0`]
/// differs ([`mod@crate::mx`]): its scale is the reciprocal of the byte's power of two, and NaN for
/// an amax that is not finite.
#[inline(always)]
pub fn amax_to_scale(amax: f32, format: Format, mode: ScaleMode) -> Scale {
    // Without branches, for loops over many amaxes.
    let quotient = || (f64::from(format.max()) / f64::from(amax.min(f32::MAX)).max(MIN_AMAX)) as f32;
    let scale = match mode {
        ScaleMode::F32 => quotient(),
        ScaleMode::PowerOfTwo => f32::from_bits(quotient().to_bits() & 0x7f80_0000),
        ScaleMode::E8m0(mode) | ScaleMode::E8m0Square(mode) => e8m0_scale(amax_to_e8m0(amax, format, mode)),
    };
    Scale::new(if amax.is_nan() { f32::NAN } else { scale })
}

/// `out[i] = encode(x[i] · scale)`.
#[inline(always)]
fn cast_all(x: &[f32], scale: Scale, format: Format, out: &mut [u8]) {
    for_each_format!(format => for (code, &x) in out.iter_mut().zip(x) {
        *code = encode(x * scale.get(), format);
    })
}

/// `out[i] = encode(x[i] · scales[i])`.
#[inline(always)]
fn cast_each(x: &[f32], scales: &[Scale], format: Format, out: &mut [u8]) {
    for_each_format!(format => for ((code, &x), &scale) in out.iter_mut().zip(x).zip(scales) {
        *code = encode(x * scale.get(), format);
    })
}
