//! Independent oracles: a format's values by definition in f64, encoding by search over them, and
//! E8M0 scales by logarithms.

use float8_kernels::{Format, ScaleCalculationMode};

/// Value of a code by the definition `±(1 + f/2^m) · 2^(e - bias)`, for subnormals
/// `±f/2^m · 2^(1 - bias)`.
pub(crate) fn value(code: u8, format: Format) -> f64 {
    let (mantissa, bias) = match format {
        Format::E4m3 => (3, 7),
        Format::E5m2 => (2, 15),
    };
    let sign = if code & 0x80 != 0 { -1.0 } else { 1.0 };
    let exponent = i32::from((code & 0x7f) >> mantissa);
    let fraction = f64::from(code & ((1 << mantissa) - 1)) / f64::from(1 << mantissa);
    match format {
        Format::E4m3 if code & 0x7f == 0x7f => return f64::NAN,
        Format::E5m2 if exponent == 31 && fraction == 0.0 => return sign * f64::INFINITY,
        Format::E5m2 if exponent == 31 => return f64::NAN,
        _ => {}
    }
    sign * if exponent == 0 { fraction * 2f64.powi(1 - bias) } else { (1.0 + fraction) * 2f64.powi(exponent - bias) }
}

/// Finite non-negative values in order of their codes.
pub(crate) fn magnitudes(format: Format) -> Vec<f64> {
    (0..=0x7f).map(|code| value(code, format)).take_while(|value| value.is_finite()).collect()
}

/// Nearest value of a format, ties to the even code, saturating, NaN to `0x7f`.
pub(crate) struct Nearest(Vec<f64>);

impl Nearest {
    pub(crate) fn new(format: Format) -> Self {
        Self(magnitudes(format))
    }

    pub(crate) fn encode(&self, x: f32) -> u8 {
        if x.is_nan() {
            return 0x7f;
        }
        let sign = if x.is_sign_negative() { 0x80 } else { 0 };
        let x = f64::from(x.abs());
        let above = self.0.partition_point(|&value| value <= x);
        if above == self.0.len() {
            return sign | (above - 1) as u8;
        }
        let (down, up) = (x - self.0[above - 1], self.0[above] - x);
        let up = up < down || (up == down && above % 2 == 0);
        sign | if up { above } else { above - 1 } as u8
    }
}

/// `2^-clamp(e - e_max, -127, 127)`.
pub(crate) fn e8m0_scale(amax: f32, format: Format, mode: ScaleCalculationMode) -> f32 {
    let log2 = |x: f32| f64::from(x).log2();
    // Half a step of the format's mantissa in the binade of the amax.
    let half_step = (log2(amax).floor().max(-126.0) - f64::from(format.mantissa_bits()) - 1.0).exp2();
    let even = (f64::from(amax) + half_step) as f32;
    let largest = if mode == ScaleCalculationMode::Even { even } else { amax };
    if !largest.is_finite() {
        return f32::NAN;
    }
    let max_exponent = log2(format.max()).floor();
    let exponent = match mode {
        ScaleCalculationMode::Floor | ScaleCalculationMode::Even => log2(largest).floor() - max_exponent,
        ScaleCalculationMode::Ceil => log2(largest).ceil() - max_exponent,
        ScaleCalculationMode::Rceil => log2(amax * (1.0 / format.max())).ceil(),
    };
    (-exponent.clamp(-127.0, 127.0)).exp2() as f32
}
