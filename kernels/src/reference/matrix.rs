//! Whole matrices on the host: casts with scales of any granularity, and the GEMM in f64.

use half::bf16;

use super::{amax_to_scale, cast_all, cast_each, decode, from_magnitude, larger, largest, magnitude};
use crate::granularity::MX_BLOCK;
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
    let mut codes = vec![0; x.len()];
    let (scales, amax) = quantize_into(x, rows, cols, cast, transposed, &mut codes);
    HostQuantized { codes, scales, amax }
}

/// [`quantize`] to codes that are there already; scales and amax.
///
/// # Panics
/// If `x` or `codes` do not hold `rows · cols` elements.
pub fn quantize_into(
    x: &[f32],
    rows: usize,
    cols: usize,
    cast: Cast,
    transposed: bool,
    codes: &mut [u8],
) -> (Vec<Scale>, f32) {
    assert_eq!(x.len(), rows * cols, "quantize: x is not [{rows}, {cols}]");
    assert_eq!(codes.len(), x.len(), "quantize: one code per element");
    if x.is_empty() {
        let [height, width] =
            if transposed { cast.granularity.scale_dims(cols, rows) } else { cast.granularity.scale_dims(rows, cols) };
        return (vec![amax_to_scale(0.0, cast.format, cast.scale_mode); height * width], 0.0);
    }
    let size @ [height, width] = group(cast.granularity, rows, cols, transposed);
    let (scales, amax) = cast_parts(x, Parts { size, cols, cast }, codes);
    let (bands, parts) = (rows.div_ceil(height), cols.div_ceil(width));
    let by_columns = || (0..parts).flat_map(|part| (0..bands).map(move |band| band * parts + part)).map(|i| scales[i]);
    (if transposed { by_columns().collect() } else { scales }, amax)
}

/// How a matrix is divided into parts that share a scale.
#[derive(Clone, Copy)]
struct Parts {
    /// Rows and columns of a part.
    size: [usize; 2],
    /// Of the matrix.
    cols: usize,
    cast: Cast,
}

vectorized! {
    /// Codes, the scales of all parts row by row, and the amax.
    fn cast_parts(x: &[f32], parts: Parts, codes: &mut [u8]) -> (Vec<Scale>, f32) {
        let Parts { size: [height, width], cols, cast } = parts;
        let scale_of = |bits| amax_to_scale(from_magnitude(bits), cast.format, cast.scale_mode);
        let (mut scales, mut amax) = (vec![], 0);
        let (mut maxima, mut factors) = (vec![], vec![]);
        for (band, codes) in x.chunks(height * cols).zip(codes.chunks_mut(height * cols)) {
            maxima.clear();
            if width == 1 {
                largest_of_columns(band, cols, &mut maxima);
            } else {
                maxima.resize(cols.div_ceil(width), 0);
                for row in band.chunks(cols) {
                    for (bits, part) in maxima.iter_mut().zip(row.chunks(width)) {
                        *bits = larger(*bits, largest(part));
                    }
                }
            }
            let first = scales.len();
            for &bits in &maxima {
                scales.push(scale_of(bits));
                amax = larger(amax, bits);
            }
            if width == 1 {
                factors.clear();
                for scale in &scales[first..] {
                    factors.push(scale.get());
                }
                cast_rows(band, &factors, cast.format, codes);
            } else {
                for (row, codes) in band.chunks(cols).zip(codes.chunks_mut(cols)) {
                    for ((part, codes), &scale) in row.chunks(width).zip(codes.chunks_mut(width)).zip(&scales[first..]) {
                        cast_all(part, scale, cast.format, codes);
                    }
                }
            }
        }
        (scales, from_magnitude(amax))
    }
}

/// Rows and columns of `x [rows, cols]`, which has elements, that share one scale.
fn group(granularity: Granularity, rows: usize, cols: usize, transposed: bool) -> [usize; 2] {
    let [height, width] = if transposed {
        let [height, width] = granularity.group(cols, rows);
        [width, height]
    } else {
        granularity.group(rows, cols)
    };
    [height.min(rows), width.min(cols)]
}

/// Bits of the largest magnitude of each column, row by row so that memory is read in order.
#[inline(always)]
fn largest_of_columns(x: &[f32], cols: usize, maxima: &mut Vec<i32>) {
    maxima.clear();
    maxima.resize(cols, 0);
    for row in x.chunks(cols) {
        for (bits, &x) in maxima.iter_mut().zip(row) {
            *bits = larger(*bits, magnitude(x));
        }
    }
}

#[inline(always)]
fn cast_rows(x: &[f32], scales: &[f32], format: Format, codes: &mut [u8]) {
    for (row, codes) in x.chunks(scales.len()).zip(codes.chunks_mut(scales.len())) {
        cast_each(row, scales, format, codes);
    }
}

vectorized! {
    /// The amax of each column of `x [_, cols]`, of a part of the rows of a larger matrix, say.
    ///
    /// # Panics
    /// If `cols` is zero.
    pub fn column_amaxes(x: &[f32], cols: usize) -> Vec<f32> {
        let mut maxima = vec![];
        largest_of_columns(x, cols, &mut maxima);
        maxima.into_iter().map(from_magnitude).collect()
    }

    /// `codes[r, c] = encode(x[r, c] · scales[c])`.
    ///
    /// # Panics
    /// If there are no scales, or the codes are not as many as the elements.
    pub fn cast_columns(x: &[f32], scales: &[Scale], format: Format, codes: &mut [u8]) -> () {
        assert_eq!(codes.len(), x.len(), "cast_columns: one code per element");
        let scales: Vec<f32> = scales.iter().map(|scale| scale.get()).collect();
        cast_rows(x, &scales, format, codes)
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
        let [height, width] = self.granularity.group(self.rows, self.k);
        let [_, groups] = self.granularity.scale_dims(self.rows, self.k);
        self.inv_scales[row / height * groups + col / width].get()
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
