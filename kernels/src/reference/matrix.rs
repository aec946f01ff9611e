//! Whole matrices on the host: casts with scales of any granularity, and the GEMM in f64.

use half::bf16;

use super::{amax_to_scale, cast_each, decode, from_magnitude, larger, largest, magnitude};
use crate::mx::MX_BLOCK;
use crate::operand::BLOCK;
use crate::{Cast, Format, Granularity, InvScale, Scale};

/// What [`quantize`] returns for `x [rows, cols]`.
#[derive(Clone, Debug, PartialEq)]
pub struct HostQuantized {
    /// One code per element, in the row-major layout of `x`, without padding.
    pub codes: Vec<u8>,
    /// Scales of the operand, row-major, [`scale_dims`](Granularity::scale_dims) of them.
    pub scales: Vec<Scale>,
    /// max |x|; NaN if `x` holds one.
    pub amax: f32,
}

/// Codes of `x [rows, cols]` with the scales that made them: of the operand `x`, contraction over columns, or with
/// `transposed` of the operand `xᵀ [cols, rows]`, contraction over rows.
///
/// The codes lie in the layout of `x` in both cases. An `x` without elements has scales of amax 0.
///
/// # Panics
/// If `x` does not hold `rows · cols` elements.
pub fn quantize(x: &[f32], rows: usize, cols: usize, cast: Cast, transposed: bool) -> HostQuantized {
    assert_eq!(x.len(), rows * cols, "quantize: x is not [{rows}, {cols}]");
    let scale_of = |amax| amax_to_scale(amax, cast.format, cast.scale_mode);
    if x.is_empty() {
        let [height, width] =
            if transposed { cast.granularity.scale_dims(cols, rows) } else { cast.granularity.scale_dims(rows, cols) };
        return HostQuantized { codes: Vec::new(), scales: vec![scale_of(0.0); height * width], amax: 0.0 };
    }
    let [height, width] = group(cast.granularity, rows, cols, transposed);
    let mut codes = vec![0; x.len()];
    let mut scales = Vec::with_capacity(rows.div_ceil(height) * cols.div_ceil(width));
    let mut amax = 0;
    let mut columns = Columns::default();
    for (band, codes) in x.chunks(height * cols).zip(codes.chunks_mut(height * cols)) {
        if width == cols {
            let bits = largest(band);
            let scale = scale_of(from_magnitude(bits));
            super::cast(band, scale, cast.format, codes);
            scales.push(scale);
            amax = larger(amax, bits);
        } else if width == 1 {
            columns.cast(band, cols, cast.format, scale_of, codes);
            scales.extend(columns.scales.iter().copied().map(Scale::new));
            amax = columns.maxima.iter().copied().fold(amax, larger);
        } else {
            for start in (0..cols).step_by(width) {
                let part = start..(start + width).min(cols);
                let bits = band.chunks(cols).fold(0, |bits, row| larger(bits, largest(&row[part.clone()])));
                let scale = scale_of(from_magnitude(bits));
                for (row, codes) in band.chunks(cols).zip(codes.chunks_mut(cols)) {
                    super::cast(&row[part.clone()], scale, cast.format, &mut codes[part.clone()]);
                }
                scales.push(scale);
                amax = larger(amax, bits);
            }
        }
    }
    if transposed {
        let (bands, parts) = (rows.div_ceil(height), cols.div_ceil(width));
        scales =
            (0..parts).flat_map(|part| (0..bands).map(move |band| band * parts + part)).map(|i| scales[i]).collect();
    }
    HostQuantized { codes, scales, amax: from_magnitude(amax) }
}

/// Rows and columns of `x [rows, cols]`, which has elements, that share one scale.
fn group(granularity: Granularity, rows: usize, cols: usize, transposed: bool) -> [usize; 2] {
    match (granularity, transposed) {
        (Granularity::Tensor, _) => [rows, cols],
        (Granularity::Row, false) => [1, cols],
        (Granularity::Row, true) => [rows, 1],
        (Granularity::Block1x128, false) => [1, BLOCK.min(cols)],
        (Granularity::Block1x128, true) => [BLOCK.min(rows), 1],
        (Granularity::Block128x128, _) => [BLOCK.min(rows), BLOCK.min(cols)],
        (Granularity::Block1x32, false) => [1, MX_BLOCK.min(cols)],
        (Granularity::Block1x32, true) => [MX_BLOCK.min(rows), 1],
    }
}

/// One scale per column of a band of rows, row by row so that memory is read in order.
#[derive(Default)]
struct Columns {
    maxima: Vec<i32>,
    scales: Vec<f32>,
}

impl Columns {
    fn cast(&mut self, band: &[f32], cols: usize, format: Format, scale_of: impl Fn(f32) -> Scale, codes: &mut [u8]) {
        self.maxima.clear();
        self.maxima.resize(cols, 0);
        for row in band.chunks(cols) {
            for (bits, &x) in self.maxima.iter_mut().zip(row) {
                *bits = larger(*bits, magnitude(x));
            }
        }
        self.scales.clear();
        self.scales.extend(self.maxima.iter().map(|&bits| scale_of(from_magnitude(bits)).get()));
        for (row, codes) in band.chunks(cols).zip(codes.chunks_mut(cols)) {
            cast_each(row, &self.scales, format, codes);
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
    /// What shares one scale.
    pub granularity: Granularity,
    /// What dequantizes them, row-major [`scale_dims`](Granularity::scale_dims).
    pub inv_scales: &'a [InvScale],
}

impl HostOperand<'_> {
    /// Panics if a slice does not have the length that the shape says.
    pub(super) fn assert_lengths(&self) {
        let &HostOperand { rows, k, granularity, .. } = self;
        assert_eq!(self.codes.len(), rows * k, "the codes are not [{rows}, {k}]");
        let [height, width] = granularity.scale_dims(rows, k);
        assert_eq!(self.inv_scales.len(), height * width, "the {granularity} scales are not [{height}, {width}]");
    }

    /// What dequantizes the code `(row, col)`.
    pub(super) fn inv_scale(&self, row: usize, col: usize) -> f32 {
        let blocks = self.k.div_ceil(BLOCK);
        let index = match self.granularity {
            Granularity::Tensor => 0,
            Granularity::Row => row,
            Granularity::Block1x128 => row * blocks + col / BLOCK,
            Granularity::Block128x128 => row / BLOCK * blocks + col / BLOCK,
            Granularity::Block1x32 => row * self.k.div_ceil(MX_BLOCK) + col / MX_BLOCK,
        };
        self.inv_scales[index].get()
    }

    /// `value(code) · inv_scale`, exact in f64.
    pub(super) fn values(&self) -> Vec<f64> {
        self.assert_lengths();
        let mut values = Vec::with_capacity(self.codes.len());
        for row in 0..self.rows {
            for start in (0..self.k).step_by(MX_BLOCK) {
                let inv_scale = f64::from(self.inv_scale(row, start));
                let codes = &self.codes[row * self.k..][start..(start + MX_BLOCK).min(self.k)];
                values.extend(codes.iter().map(|&code| f64::from(decode(code, self.format)) * inv_scale));
            }
        }
        values
    }
}

/// `bf16(value(code) · inv_scale)` of an operand with E8M0 scales, `[rows, k]` without padding; every NaN is `0x7fff`.
///
/// The products are exact in f32, or infinite.
///
/// # Panics
/// If the operand is not [`Granularity::Block1x32`], or a slice does not have the length that its shape says.
pub fn dequantize_mx(operand: &HostOperand<'_>) -> Vec<bf16> {
    operand.assert_lengths();
    assert!(operand.granularity.is_mx(), "dequantize_mx: {} scales are not E8M0", operand.granularity);
    let value = |(i, &code): (usize, &u8)| {
        let value = decode(code, operand.format) * operand.inv_scale(i / operand.k, i % operand.k);
        if value.is_nan() { bf16::from_bits(0x7fff) } else { bf16::from_f32(value) }
    };
    operand.codes.iter().enumerate().map(value).collect()
}

/// `out [M, N] = Â [M, K] · B̂ [N, K]ᵀ + bias [N]` with `value · inv_scale` for each code, in f64, row-major: what the error
/// of a GEMM is measured against. Any two granularities.
///
/// # Panics
/// If the operands differ in `k`, or a slice does not have the length that the shapes say.
pub fn scaled_gemm_f64(a: &HostOperand<'_>, b: &HostOperand<'_>, bias: Option<&[f32]>) -> Vec<f64> {
    assert_eq!(a.k, b.k, "scaled_gemm: contraction lengths");
    let (left, right) = (a.values(), b.values());
    if let Some(bias) = bias {
        assert_eq!(bias.len(), b.rows, "scaled_gemm: one bias per column");
    }
    let mut out = Vec::with_capacity(a.rows * b.rows);
    for row in 0..a.rows {
        for col in 0..b.rows {
            let pairs = left[row * a.k..][..a.k].iter().zip(&right[col * b.k..][..b.k]);
            let sum: f64 = pairs.map(|(x, y)| x * y).sum();
            out.push(sum + bias.map_or(0.0, |bias| f64::from(bias[col])));
        }
    }
    out
}
