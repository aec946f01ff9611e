//! Whole matrices on the host: casts with scales of any granularity, and the GEMM in f64.

use half::bf16;

use super::{amax_to_scale, cast_all, cast_each, decode, decode_each, from_magnitude, larger, largest, magnitude};
use crate::granularity::{BLOCK, MX_BLOCK};
use crate::{Cast, Format, Granularity, InvScale, Scale, ScaleMode};

/// Result of [`quantize`] for `x [rows, cols]`.
#[derive(Clone, Debug, PartialEq)]
pub struct HostQuantized {
    /// One code per element, in the row-major layout of `x`, without padding.
    pub codes: Vec<u8>,
    /// Scales of the operand, row-major, with the dimensions
    /// [`scale_dims`](Granularity::scale_dims).
    pub scales: Vec<Scale>,
    /// max |x|, NaN if `x` contains one.
    pub amax: f32,
}

/// Codes of `x [rows, cols]` with their scales. The operand is `x`, with contraction over columns.
/// With `transposed` it is `xᵀ [cols, rows]`, with contraction over rows.
///
/// The codes have the layout of `x` in both cases. An `x` without elements has scales of amax 0.
///
/// # Panics
/// If `x` does not have `rows · cols` elements.
pub fn quantize(x: &[f32], rows: usize, cols: usize, cast: Cast, transposed: bool) -> HostQuantized {
    let mut codes = vec![0; x.len()];
    let (scales, amax) = quantize_into(x, rows, cols, cast, transposed, &mut codes);
    let [height, width] = if transposed { cast.granularity.scale_dims(cols, rows) } else { [1, scales.len()] };
    // Transposes from [width, height], the order of the parts of x.
    let of_operand = (0..height).flat_map(|r| (0..width).map(move |c| c * height + r)).map(|i| scales[i]);
    HostQuantized { scales: of_operand.collect(), codes, amax }
}

/// [`quantize`] into existing codes. Returns scales and amax. The scales have the order of their
/// parts of `x`, row by row. With `transposed` this is the transpose of the operand's order.
///
/// # Panics
/// If `x` or `codes` do not have `rows · cols` elements.
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
    let is_square = matches!(cast.scale_mode, ScaleMode::E8m0Square(_));
    let size = if is_square { [MX_BLOCK; 2] } else { group(cast.granularity, rows, cols, transposed) };
    let parts = Parts { size, cols };
    let maxima = largest_of_parts(x, parts);
    let (scales, amax) = scale_maxima(&maxima, cast);
    cast_parts(x, parts, &scales, cast.format, codes);
    (if is_square { spread_squares(&scales, [rows, cols], transposed) } else { scales }, amax)
}

/// Copies the scales of squares of `x [rows, cols]` to each of their rows, or columns, in the
/// layout of blocks of 32.
fn spread_squares(scales: &[Scale], [rows, cols]: [usize; 2], transposed: bool) -> Vec<Scale> {
    let squares = cols.div_ceil(MX_BLOCK);
    match transposed {
        false => (0..rows).flat_map(|row| scales[row / MX_BLOCK * squares..][..squares].iter().copied()).collect(),
        true => {
            let bands = scales.chunks(squares);
            bands.flat_map(|band| (0..cols).map(|col| band[col / MX_BLOCK])).collect()
        }
    }
}

/// Partition of a matrix into parts that share a scale.
#[derive(Clone, Copy)]
struct Parts {
    /// Rows and columns of a part.
    size: [usize; 2],
    /// Columns of the matrix.
    cols: usize,
}

impl Parts {
    /// Elements of a band of adjacent parts.
    const fn band(self) -> usize {
        self.size[0] * self.cols
    }

    /// Parts in a band.
    const fn in_band(self) -> usize {
        self.cols.div_ceil(self.size[1])
    }
}

vectorized! {
    /// Bits of the largest magnitude of each part of `x [_, cols]`.
    fn largest_of_parts(x: &[f32], parts: Parts) -> Vec<i32> {
        let mut maxima = vec![0; x.len().div_ceil(parts.band()) * parts.in_band()];
        for (band, maxima) in x.chunks(parts.band()).zip(maxima.chunks_mut(parts.in_band())) {
            match parts.size[1] {
                1 => largest_of_columns(band, maxima),
                MX_BLOCK => largest_of_blocks::<MX_BLOCK>(band, parts.cols, maxima),
                BLOCK => largest_of_blocks::<BLOCK>(band, parts.cols, maxima),
                // Parts as wide as the matrix.
                _ => maxima[0] = largest(band),
            }
        }
        maxima
    }

    /// Scales of the maxima, and the amax of all.
    fn scale_maxima(maxima: &[i32], cast: Cast) -> (Vec<Scale>, f32) {
        let Cast { format, scale_mode, .. } = cast;
        let mut scales = vec![Scale::new(0.0); maxima.len()];
        // The mode is a constant in each loop.
        match scale_mode {
            ScaleMode::F32 => scale_each(maxima, format, ScaleMode::F32, &mut scales),
            ScaleMode::PowerOfTwo => scale_each(maxima, format, ScaleMode::PowerOfTwo, &mut scales),
            ScaleMode::E8m0(mode) | ScaleMode::E8m0Square(mode) => {
                scale_each(maxima, format, ScaleMode::E8m0(mode), &mut scales)
            }
        }
        (scales, from_magnitude(maxima.iter().fold(0, |amax, &bits| larger(amax, bits))))
    }

    /// Casts the parts of `x [_, cols]`, each with its scale.
    fn cast_parts(x: &[f32], parts: Parts, scales: &[Scale], format: Format, codes: &mut [u8]) -> () {
        let cols = parts.cols;
        let bands = x.chunks(parts.band()).zip(codes.chunks_mut(parts.band()));
        for ((x, codes), scales) in bands.zip(scales.chunks(parts.in_band())) {
            match parts.size[1] {
                1 => cast_rows(x, scales, format, codes),
                MX_BLOCK => cast_blocks::<MX_BLOCK>(x, cols, scales, format, codes),
                BLOCK => cast_blocks::<BLOCK>(x, cols, scales, format, codes),
                _ => cast_all(x, scales[0], format, codes),
            }
        }
    }
}

/// Rows and columns of the parts of a non-empty `x [rows, cols]` that share a scale.
fn group(granularity: Granularity, rows: usize, cols: usize, transposed: bool) -> [usize; 2] {
    let [height, width] = if transposed {
        let [height, width] = granularity.group(cols, rows);
        [width, height]
    } else {
        granularity.group(rows, cols)
    };
    [height.min(rows), width.min(cols)]
}

/// Updates the bits of each column's largest magnitude, row by row so that memory is read in order.
#[inline(always)]
fn largest_of_columns(x: &[f32], maxima: &mut [i32]) {
    for row in x.chunks(maxima.len()) {
        for (bits, &x) in maxima.iter_mut().zip(row) {
            *bits = larger(*bits, magnitude(x));
        }
    }
}

/// Updates the bits of the largest magnitude of each `WIDTH` columns, fewer at the end of a row.
/// The width is a constant, so that a block is a few vectors without a loop.
#[inline(always)]
fn largest_of_blocks<const WIDTH: usize>(x: &[f32], cols: usize, maxima: &mut [i32]) {
    for row in x.chunks(cols) {
        let (blocks, rest) = row.as_chunks::<WIDTH>();
        for (bits, block) in maxima.iter_mut().zip(blocks) {
            *bits = larger(*bits, largest(block));
        }
        if !rest.is_empty() {
            let last = &mut maxima[blocks.len()];
            *last = larger(*last, largest(rest));
        }
    }
}

#[inline(always)]
fn scale_each(maxima: &[i32], format: Format, mode: ScaleMode, scales: &mut [Scale]) {
    for (scale, &bits) in scales.iter_mut().zip(maxima) {
        *scale = amax_to_scale(from_magnitude(bits), format, mode);
    }
}

/// `codes[r, c] = encode(x[r, c] · scales[c])`.
#[inline(always)]
fn cast_rows(x: &[f32], scales: &[Scale], format: Format, codes: &mut [u8]) {
    for (row, codes) in x.chunks(scales.len()).zip(codes.chunks_mut(scales.len())) {
        cast_each(row, scales, format, codes);
    }
}

/// Casts each row with one scale per `WIDTH` columns.
#[inline(always)]
fn cast_blocks<const WIDTH: usize>(x: &[f32], cols: usize, scales: &[Scale], format: Format, codes: &mut [u8]) {
    for (row, codes) in x.chunks(cols).zip(codes.chunks_mut(cols)) {
        let ((blocks, rest), (block_codes, rest_codes)) = (row.as_chunks::<WIDTH>(), codes.as_chunks_mut::<WIDTH>());
        for ((block, codes), &scale) in blocks.iter().zip(block_codes).zip(scales) {
            cast_all(block, scale, format, codes);
        }
        if !rest.is_empty() {
            cast_all(rest, scales[blocks.len()], format, rest_codes);
        }
    }
}

vectorized! {
    /// Amax of each column of `x [_, cols]`, which may be some rows of a larger matrix.
    ///
    /// # Panics
    /// If `cols` is zero.
    pub fn column_amaxes(x: &[f32], cols: usize) -> Vec<f32> {
        let mut maxima = vec![0; cols];
        largest_of_columns(x, &mut maxima);
        maxima.into_iter().map(from_magnitude).collect()
    }

    /// `codes[r, c] = encode(x[r, c] · scales[c])`.
    ///
    /// # Panics
    /// If there are no scales, or the number of codes differs from the number of elements.
    pub fn cast_columns(x: &[f32], scales: &[Scale], format: Format, codes: &mut [u8]) -> () {
        assert_eq!(codes.len(), x.len(), "cast_columns: one code per element");
        cast_rows(x, scales, format, codes)
    }

    /// Values of `codes [_, cols]` in f32. Parts of `size` rows and columns share a scale; the
    /// scales are row-major:
    /// `out[r, c] = f32(decode(codes[r, c]) · inv_scales[r / size[0], c / size[1]])`.
    ///
    /// # Panics
    /// If `size` or `cols` is zero, the number of values differs from the number of codes, or
    /// scales are missing.
    pub fn dequantize_into(
        codes: &[u8],
        cols: usize,
        format: Format,
        size: [usize; 2],
        inv_scales: &[InvScale],
        out: &mut [f32],
    ) -> () {
        assert_eq!(codes.len(), out.len(), "dequantize_into: one value per code");
        for_each_format!(format => dequantize_parts(codes, Parts { size, cols }, format, inv_scales, out))
    }
}

#[inline(always)]
fn dequantize_parts(codes: &[u8], parts: Parts, format: Format, inv_scales: &[InvScale], out: &mut [f32]) {
    let needed = codes.len().div_ceil(parts.band()) * parts.in_band();
    assert!(inv_scales.len() >= needed, "dequantize_into: a scale per part");
    let bands = codes.chunks(parts.band()).zip(out.chunks_mut(parts.band()));
    for ((codes, out), scales) in bands.zip(inv_scales.chunks(parts.in_band())) {
        for (codes, out) in codes.chunks(parts.cols).zip(out.chunks_mut(parts.cols)) {
            match parts.size[1] {
                1 => {
                    // The same length as the codes, visible to the compiler.
                    let scales = &scales[..codes.len()];
                    decode_each(codes, format, |i| scales[i].get(), out);
                }
                MX_BLOCK => dequantize_blocks::<MX_BLOCK>(codes, format, scales, out),
                BLOCK => dequantize_blocks::<BLOCK>(codes, format, scales, out),
                width => {
                    for ((codes, out), scale) in codes.chunks(width).zip(out.chunks_mut(width)).zip(scales) {
                        decode_each(codes, format, |_| scale.get(), out);
                    }
                }
            }
        }
    }
}

/// Dequantizes a row with one scale per `WIDTH` columns.
#[inline(always)]
fn dequantize_blocks<const WIDTH: usize>(codes: &[u8], format: Format, scales: &[InvScale], out: &mut [f32]) {
    let ((blocks, rest), (block_out, rest_out)) = (codes.as_chunks::<WIDTH>(), out.as_chunks_mut::<WIDTH>());
    for ((codes, out), scale) in blocks.iter().zip(block_out).zip(scales) {
        decode_each(codes, format, |_| scale.get(), out);
    }
    if !rest.is_empty() {
        decode_each(rest, format, |_| scales[blocks.len()].get(), rest_out);
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
    /// Elements that share a scale.
    pub granularity: Granularity,
    /// Inverse scales, row-major, with the dimensions [`scale_dims`](Granularity::scale_dims).
    pub inv_scales: &'a [InvScale],
}

impl HostOperand<'_> {
    /// Panics if a slice does not have the length of the shape.
    pub(super) fn assert_lengths(&self) {
        let &HostOperand { rows, k, granularity, .. } = self;
        assert_eq!(self.codes.len(), rows * k, "the codes are not [{rows}, {k}]");
        let [height, width] = granularity.scale_dims(rows, k);
        assert_eq!(self.inv_scales.len(), height * width, "the {granularity} scales are not [{height}, {width}]");
    }

    /// Inverse scale of the code `(row, col)`.
    ///
    /// # Panics
    /// If it has no scale.
    pub fn inv_scale(&self, row: usize, col: usize) -> f32 {
        let [height, width] = self.granularity.group(self.rows, self.k);
        let [_, groups] = self.granularity.scale_dims(self.rows, self.k);
        self.inv_scales[row / height * groups + col / width].get()
    }

    /// `value(code) · inv_scale`, exact in f64.
    pub(crate) fn values(&self) -> Vec<f64> {
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

/// `bf16(value(code) · inv_scale)` of an operand with E8M0 scales, `[rows, k]` without padding.
/// Every NaN is `0x7fff`.
///
/// The products are exact in f32, or infinite.
///
/// # Panics
/// If the operand is not [`Granularity::Block1x32`], or a slice does not have the length of its
/// shape.
pub fn dequantize_mx(operand: &HostOperand<'_>) -> Vec<bf16> {
    operand.assert_lengths();
    assert!(operand.granularity.is_mx(), "dequantize_mx: {} scales are not E8M0", operand.granularity);
    let value = |(i, &code): (usize, &u8)| {
        let value = decode(code, operand.format) * operand.inv_scale(i / operand.k, i % operand.k);
        if value.is_nan() { bf16::from_bits(0x7fff) } else { bf16::from_f32(value) }
    };
    operand.codes.iter().enumerate().map(value).collect()
}

/// Codes `[k, rows]` and scales of the transpose of an operand whose scales serve both
/// orientations. For blocks of 32, each square of 32 by 32 has the scale of its first row.
///
/// # Panics
/// If scales are per row or of 1x128 blocks, or a slice does not have the length of its shape.
pub fn transpose(operand: &HostOperand<'_>) -> (Vec<u8>, Vec<InvScale>) {
    operand.assert_lengths();
    let &HostOperand { codes, rows, k, granularity, .. } = operand;
    let both_ways = matches!(granularity, Granularity::Tensor | Granularity::Block128x128 | Granularity::Block1x32);
    assert!(both_ways, "transpose: {granularity} scales do not serve both orientations");
    let transposed = (0..k).flat_map(|col| (0..rows).map(move |row| codes[row * k + col])).collect();
    let ([height, width], [down, across]) = (granularity.group(k, rows), granularity.scale_dims(k, rows));
    let scale = |i: usize, j: usize| InvScale::new(operand.inv_scale(j * width, i * height));
    (transposed, (0..down).flat_map(|i| (0..across).map(move |j| scale(i, j))).collect())
}

/// `out [M, N] = Â [M, K] · B̂ [N, K]ᵀ + bias [N]` with `value · inv_scale` for each code, in f64,
/// row-major, for any two granularities. The reference for the error of a GEMM.
///
/// # Panics
/// If the operands differ in `k`, or a slice does not have the length of its shape.
pub fn scaled_gemm_f64(a: &HostOperand<'_>, b: &HostOperand<'_>, bias: Option<&[f32]>) -> Vec<f64> {
    assert_eq!(a.k, b.k, "scaled_gemm: contraction lengths");
    if let Some(bias) = bias {
        assert_eq!(bias.len(), b.rows, "scaled_gemm: one bias per column");
    }
    let right = b.values();
    dot_products(&a.values(), |col, i| right[col * b.k + i], [a.rows, b.rows, a.k], bias)
}

/// `out [M, N] = A [M, K] · B [K, N] + bias [N]` in f64, row-major. The reference of
/// [`HalfGemm`](crate::HalfGemm).
///
/// # Panics
/// If a slice does not have the length of its shape.
pub fn matmul_f64(a: &[f32], b: &[f32], product: [usize; 3], bias: Option<&[f32]>) -> Vec<f64> {
    let [m, n, k] = product;
    assert_eq!([a.len(), b.len()], [m * k, k * n], "matmul: shapes");
    let left: Vec<f64> = a.iter().copied().map(f64::from).collect();
    dot_products(&left, |col, i| f64::from(b[i * n + col]), product, bias)
}

/// Dot products of rows of `left [M, K]` and columns of `right`, a function of the column and the
/// index, plus the bias.
fn dot_products(
    left: &[f64],
    right: impl Fn(usize, usize) -> f64,
    [m, n, k]: [usize; 3],
    bias: Option<&[f32]>,
) -> Vec<f64> {
    let mut out = Vec::with_capacity(m * n);
    for row in 0..m {
        for col in 0..n {
            let sum: f64 = left[row * k..][..k].iter().enumerate().map(|(i, x)| x * right(col, i)).sum();
            out.push(sum + bias.map_or(0.0, |bias| f64::from(bias[col])));
        }
    }
    out
}
