//! The kernels' results on the host, one scalar at a time: the oracle of the tests and the CPU backend's cast.
//!
//! The loops are branch-free over slices, so that the compiler vectorises them.

use crate::format::F32_INF;
use crate::scale::MIN_AMAX;
use crate::{Cast, Format, Granularity, InvScale, Scale, ScaleMode};

/// FP8 code of `x`: rounded to nearest even, saturating. ±inf gives ±max, NaN gives `sign | 0x7f`, in both formats.
///
/// Subnormals by the addition that leaves the rounded code in the low bits of the sum, normals by integer rounding of the
/// f32 bits.
#[inline]
pub fn encode(x: f32, format: Format) -> u8 {
    // Signed integers, which the baseline vector instructions can compare; magnitudes fit.
    let bits = x.to_bits();
    let sign = ((bits >> 24) & 0x80) as i32;
    let mag = (bits & 0x7fff_ffff) as i32;
    let drop = 23 - format.mantissa_bits() as i32;

    let magic = format.subnormal_step() * (1 << 23) as f32;
    let sub = (f32::from_bits(mag as u32) + magic).to_bits() as i32 - magic.to_bits() as i32;

    let odd = (mag >> drop) & 1;
    let rounded = (mag + ((1 << (drop - 1)) - 1) + odd) >> drop;
    let normal = rounded - ((127 - format.bias() as i32) << format.mantissa_bits());

    let is_sub = mag < (format.min_normal_exponent() as i32) << 23;
    let code = if is_sub { sub } else { normal };
    let max = i32::from(format.max_code());
    let code = if code > max { max } else { code };
    let code = if mag > F32_INF as i32 { 0x7f } else { code };
    (code | sign) as u8
}

/// Value of a code. E4M3 `0x7f` and `0xff` are NaN; E5M2 has infinities at `0x7c` and `0xfc` and NaN above them.
#[inline]
pub fn decode(code: u8, format: Format) -> f32 {
    static E4M3: [f32; 256] = decode_table(Format::E4m3);
    static E5M2: [f32; 256] = decode_table(Format::E5m2);
    match format {
        Format::E4m3 => E4M3[code as usize],
        Format::E5m2 => E5M2[code as usize],
    }
}

const fn decode_table(format: Format) -> [f32; 256] {
    let mut table = [0.0; 256];
    let mut code = 0;
    while code < 256 {
        let mag = code as u32 & 0x7f;
        let exponent = mag >> format.mantissa_bits();
        let value = if matches!(format, Format::E4m3) && mag == 0x7f {
            f32::NAN
        } else if matches!(format, Format::E5m2) && exponent == 31 {
            if mag == 0x7c { f32::INFINITY } else { f32::NAN }
        } else if exponent == 0 {
            mag as f32 * format.subnormal_step()
        } else {
            f32::from_bits((mag << (23 - format.mantissa_bits())) + ((127 - format.bias()) << 23))
        };
        table[code] = if code & 0x80 != 0 { -value } else { value };
        code += 1;
    }
    table
}

/// `max |x|`; NaN if `x` holds one, 0 if `x` is empty.
pub fn amax(x: &[f32]) -> f32 {
    // Magnitudes order like their bits, with NaN on top.
    let bits = x.iter().fold(0i32, |largest, x| {
        let mag = (x.to_bits() & 0x7fff_ffff) as i32;
        if mag > largest { mag } else { largest }
    });
    if bits > F32_INF as i32 { f32::NAN } else { f32::from_bits(bits as u32) }
}

/// `scale = f32(FMAX / max(f64(amax), 1e-12))`, as torchao's `amax_to_scale`, rounded down to a power of two if asked.
///
/// A NaN amax gives a NaN scale. An infinite one counts as `f32::MAX`, so that the scale stays positive and an infinity
/// saturates instead of turning into `inf · 0 = NaN`.
pub fn amax_to_scale(amax: f32, format: Format, mode: ScaleMode) -> Scale {
    if amax.is_nan() {
        return Scale::new(f32::NAN);
    }
    let divisor = f64::from(amax.min(f32::MAX)).max(MIN_AMAX);
    let scale = (f64::from(format.max()) / divisor) as f32;
    Scale::new(match mode {
        ScaleMode::F32 => scale,
        ScaleMode::PowerOfTwo => f32::from_bits(scale.to_bits() & 0x7f80_0000),
    })
}

/// `out[i] = encode(x[i] · scale)`.
///
/// A zero code keeps the sign of `x`, and so does a NaN code, also where the scale is what is NaN.
///
/// # Panics
/// If `x` and `out` differ in length.
pub fn cast(x: &[f32], scale: Scale, format: Format, out: &mut [u8]) {
    assert_eq!(x.len(), out.len(), "cast: one code per element");
    // A loop per format, so that the format is a constant in each.
    match format {
        Format::E4m3 => cast_slice(x, scale.get(), Format::E4m3, out),
        Format::E5m2 => cast_slice(x, scale.get(), Format::E5m2, out),
    }
}

#[inline(always)]
fn cast_slice(x: &[f32], scale: f32, format: Format, out: &mut [u8]) {
    for (code, &x) in out.iter_mut().zip(x) {
        *code = encode((x * scale).copysign(x), format);
    }
}

/// Codes of `x [rows, cols]`, row-major and without padding, with the amax and the scale that made them.
///
/// # Panics
/// If `x` does not hold `rows · cols` elements.
pub fn quantize(x: &[f32], rows: usize, cols: usize, cast: Cast) -> (Vec<u8>, f32, Scale) {
    assert_eq!(x.len(), rows * cols, "quantize: x is not [{rows}, {cols}]");
    match cast.granularity {
        Granularity::Tensor => {
            let amax = amax(x);
            let scale = amax_to_scale(amax, cast.format, cast.scale_mode);
            let mut codes = vec![0; x.len()];
            self::cast(x, scale, cast.format, &mut codes);
            (codes, amax, scale)
        }
    }
}

/// Codes of a `[rows, k]` matrix on the host, row-major and without padding.
#[derive(Clone, Copy, Debug)]
pub struct HostOperand<'a> {
    /// `rows · k` codes.
    pub codes: &'a [u8],
    /// Rows of the matrix.
    pub rows: usize,
    /// Contraction length.
    pub k: usize,
    /// Format of the codes.
    pub format: Format,
    /// What dequantizes them.
    pub inv_scale: InvScale,
}

/// `(A [M, K] · B [N, K]ᵀ) · inv_scale_a · inv_scale_b + bias [N]` in f64, row-major: what the error of a GEMM is measured
/// against.
///
/// # Panics
/// If the operands differ in `k`, or a slice does not have the length that the shapes say.
pub fn scaled_gemm_f64(a: &HostOperand<'_>, b: &HostOperand<'_>, bias: Option<&[f32]>) -> Vec<f64> {
    assert_eq!(a.k, b.k, "scaled_gemm: contraction lengths");
    let values = |operand: &HostOperand<'_>| -> Vec<f64> {
        assert_eq!(operand.codes.len(), operand.rows * operand.k, "scaled_gemm: codes are not [rows, k]");
        operand.codes.iter().map(|&code| f64::from(decode(code, operand.format))).collect()
    };
    let (left, right) = (values(a), values(b));
    if let Some(bias) = bias {
        assert_eq!(bias.len(), b.rows, "scaled_gemm: one bias per column");
    }
    let inv_scale = f64::from(a.inv_scale.get()) * f64::from(b.inv_scale.get());
    let mut out = Vec::with_capacity(a.rows * b.rows);
    for row in 0..a.rows {
        for col in 0..b.rows {
            let pairs = left[row * a.k..][..a.k].iter().zip(&right[col * b.k..][..b.k]);
            let sum: f64 = pairs.map(|(x, y)| x * y).sum();
            out.push(sum * inv_scale + bias.map_or(0.0, |bias| f64::from(bias[col])));
        }
    }
    out
}
