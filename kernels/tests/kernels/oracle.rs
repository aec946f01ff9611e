//! Independent oracles: a format's values from its definition in f64, and encoding by search over them.

use float8_kernels::Format;

/// Value of a code by the definition `±(1 + f/2^m) · 2^(e - bias)`, subnormals `±f/2^m · 2^(1 - bias)`.
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

/// The nearest value of a format, ties to the even code, saturating, NaN to `0x7f`.
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

/// Every f32 at which an encoder can go wrong: each value of the format and each midpoint, with their two neighbours, of
/// both signs; then zeros, subnormals, the ends of f32, infinities and NaNs.
pub(crate) fn edges(format: Format) -> Vec<f32> {
    let values = magnitudes(format);
    let mut points = values.clone();
    points.extend(values.windows(2).map(|pair| (pair[0] + pair[1]) / 2.0));
    // Where the value after the largest would be, and the midpoint to it.
    let step = values[values.len() - 1] - values[values.len() - 2];
    points.extend([step / 2.0, step].map(|step| step + values[values.len() - 1]));
    let mut edges: Vec<f32> = points
        .iter()
        .flat_map(|&point| {
            let point = point as f32;
            [point, point.next_up(), point.next_down()]
        })
        .collect();
    edges.extend([f32::MIN_POSITIVE, f32::from_bits(1), f32::from_bits(0x007f_ffff), f32::MAX]);
    edges.extend([f32::INFINITY, f32::NAN, f32::from_bits(0x7f80_0001), f32::from_bits(0x7fff_ffff)]);
    edges.iter().flat_map(|&x| [x, -x]).collect()
}
