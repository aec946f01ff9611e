//! Loops over all elements, on all cores: the reference implementation on a band of rows per task.
//!
//! Nothing here is generic over the backend, so it is compiled with this crate's optimization level
//! instead of the user's.

use core::mem::MaybeUninit;

#[cfg(feature = "flex")]
use burn_std::bf16;
use float8_kernels::{Cast, Format, Granularity, InvScale, Scale, ScaleMode, reference};
use rayon::prelude::*;

#[cfg(feature = "flex")]
use super::vector::{narrow, vectorized, widen};

/// Minimum number of elements per task: some ten microseconds.
pub(super) const TASK: usize = 1 << 15;

/// Codes, row-major scales, and max |x|.
pub(super) type Quantized = (Vec<u8>, Vec<Scale>, f32);

/// Runs several parallel loops from a thread of the pool. A thread outside the pool sleeps until
/// each of its loops ends, and waking it takes as long as a task.
pub(super) fn in_pool<T: Send>(run: impl FnOnce() -> T + Send) -> T {
    rayon::join(run, || ()).0
}

/// Max |x|.
pub(super) fn amax(values: &[f32]) -> f32 {
    let parts: Vec<f32> = values.par_chunks(TASK).map(reference::amax).collect();
    reference::amax(&parts)
}

/// Codes with one scale.
pub(super) fn encode(values: &[f32], scale: Scale, format: Format) -> Vec<u8> {
    let mut codes = vec![0; values.len()];
    let tasks = codes.par_chunks_mut(TASK).zip(values.par_chunks(TASK));
    tasks.for_each(|(codes, values)| reference::cast(values, scale, format, codes));
    codes
}

/// Widens values to f32.
#[cfg(feature = "flex")]
pub(super) fn widened(values: &[bf16]) -> Vec<f32> {
    let mut wide = vec![0.0; values.len()];
    let tasks = wide.par_chunks_mut(TASK).zip(values.par_chunks(TASK));
    tasks.for_each(|(wide, values)| vectorized!(widen(values, wide)));
    wide
}

/// Rounds values to the nearest bf16.
#[cfg(feature = "flex")]
pub(super) fn narrowed(values: &[f32]) -> Vec<bf16> {
    let mut narrowed = vec![bf16::ZERO; values.len()];
    let tasks = narrowed.par_chunks_mut(TASK).zip(values.par_chunks(TASK));
    tasks.for_each(|(narrowed, values)| vectorized!(narrow(values, narrowed)));
    narrowed
}

/// [`reference::quantize_into`] in parallel: with one scale, by rows, by columns or by blocks.
pub(super) fn quantize(values: &[f32], [rows, cols]: [usize; 2], cast: Cast, transposed: bool) -> Quantized {
    let mut codes = vec![0; values.len()];
    if values.is_empty() {
        let (scales, amax) = reference::quantize_into(values, rows, cols, cast, transposed, &mut codes);
        return (codes, scales, amax);
    }
    // Rows that share scales.
    let height = match (cast.granularity, transposed) {
        // MX blocks are one row high, but squares share a scale over an equal number of rows and
        // columns.
        _ if matches!(cast.scale_mode, ScaleMode::E8m0Square(_)) => cast.granularity.group(rows, cols)[1],
        (Granularity::Tensor, _) => {
            let amax = amax(values);
            let scale = reference::amax_to_scale(amax, cast.format, cast.scale_mode);
            return (encode(values, scale, cast.format), vec![scale], amax);
        }
        (Granularity::Row, true) => {
            let (scales, amax) = quantize_columns(values, cols, cast, &mut codes);
            return (codes, scales, amax);
        }
        (granularity, true) => granularity.group(cols, rows)[1],
        (granularity, false) => granularity.group(rows, cols)[0],
    };
    let band = band(cols, height);
    let tasks = codes.par_chunks_mut(band).zip(values.par_chunks(band));
    let parts: Vec<(Vec<Scale>, f32)> = tasks
        .map(|(codes, values)| reference::quantize_into(values, values.len() / cols, cols, cast, transposed, codes))
        .collect();
    let amaxes: Vec<f32> = parts.iter().map(|(_, amax)| *amax).collect();
    (codes, parts.into_iter().flat_map(|(scales, _)| scales).collect(), reference::amax(&amaxes))
}

/// Elements of a task: whole rows, a multiple of `height`.
fn band(cols: usize, height: usize) -> usize {
    TASK.div_ceil(cols).next_multiple_of(height) * cols
}

/// Casts with one scale per column: computes all maxima first, then the codes.
fn quantize_columns(values: &[f32], cols: usize, cast: Cast, codes: &mut [u8]) -> (Vec<Scale>, f32) {
    let band = band(cols, 1);
    let parts: Vec<Vec<f32>> = values.par_chunks(band).map(|part| reference::column_amaxes(part, cols)).collect();
    let amaxes = reference::column_amaxes(&parts.concat(), cols);
    let scale = |amax: &f32| reference::amax_to_scale(*amax, cast.format, cast.scale_mode);
    let scales: Vec<Scale> = amaxes.iter().map(scale).collect();
    let tasks = codes.par_chunks_mut(band).zip(values.par_chunks(band));
    tasks.for_each(|(codes, values)| reference::cast_columns(values, &scales, cast.format, codes));
    (scales, reference::amax(&amaxes))
}

/// Exact values of codes, unscaled.
pub(super) fn decode(codes: &[u8], format: Format) -> Vec<f32> {
    filled(codes.len(), TASK, |first, values| {
        reference::decode_slice(&codes[first..][..values.len()], format, values);
    })
}

/// [`reference::dequantize_into`] with blocks of `height` rows and `width` columns.
pub(super) fn dequantize(
    codes: &[u8],
    cols: usize,
    format: Format,
    [height, width]: [usize; 2],
    inv_scales: &[InvScale],
) -> Vec<f32> {
    if codes.is_empty() {
        return vec![];
    }
    filled(codes.len(), band(cols, height), |first, values| {
        let inv_scales = &inv_scales[first / cols / height * cols.div_ceil(width)..];
        reference::dequantize_into(&codes[first..][..values.len()], cols, format, [height, width], inv_scales, values);
    })
}

/// `len` values. `fill` gets the index of the first value and a slice of at most `task` values.
fn filled(len: usize, task: usize, fill: impl Fn(usize, &mut [f32]) + Sync) -> Vec<f32> {
    let mut values = Vec::with_capacity(len);
    let tasks = values.spare_capacity_mut()[..len].par_chunks_mut(task).enumerate();
    tasks.for_each(|(i, part)| {
        // Each task zeroes its part, which is then in its cache. A single thread would zero it too
        // early.
        part.fill(MaybeUninit::new(0.0));
        // SAFETY: all of them have just been written, and `MaybeUninit<f32>` has the layout of f32.
        fill(i * task, unsafe { core::slice::from_raw_parts_mut(part.as_mut_ptr().cast(), part.len()) });
    });
    // SAFETY: the tasks have written every element.
    unsafe { values.set_len(len) };
    values
}

/// Row-major `[rows, cols]` as `[cols, rows]`.
pub(super) fn transpose<T: Copy + Send + Sync>(values: &[T], [rows, cols]: [usize; 2]) -> Vec<T> {
    /// Side of a tile that is read and written by whole cache lines.
    const SIDE: usize = 64;
    let Some(any) = values.first() else { return vec![] };
    let mut transposed = vec![*any; values.len()];
    transposed.par_chunks_mut(SIDE * rows).enumerate().for_each(|(band, transposed)| {
        for first in (0..rows).step_by(SIDE) {
            for (col, row) in transposed.chunks_exact_mut(rows).enumerate() {
                let of_column = values[first * cols + band * SIDE + col..].iter().step_by(cols);
                row[first..].iter_mut().take(SIDE).zip(of_column).for_each(|(to, from)| *to = *from);
            }
        }
    });
    transposed
}

/// Epilogue of a GEMM: `y[i, j] = sum[i, j] · scale · (rows[i] · cols[j]) + bias[j]`. Each
/// operation is rounded to f32. Missing factors are 1.
pub(super) struct Epilogue<'a> {
    pub(super) scale: f32,
    pub(super) rows: Option<&'a [InvScale]>,
    pub(super) cols: Option<&'a [InvScale]>,
    pub(super) bias: Option<&'a [f32]>,
}

impl Epilogue<'_> {
    /// Whether the sums stay unchanged.
    pub(super) fn is_identity(&self) -> bool {
        self.scale == 1.0 && self.rows.is_none() && self.cols.is_none() && self.bias.is_none()
    }

    /// Turns `sums [_, n]` into the output.
    pub(super) fn apply(&self, sums: &mut [f32], n: usize) {
        if sums.is_empty() {
            return;
        }
        let rows = TASK.div_ceil(n);
        sums.par_chunks_mut(rows * n).enumerate().for_each(|(task, sums)| {
            let mut factors = vec![1.0; n];
            for (i, sums) in sums.chunks_mut(n).enumerate() {
                let row = self.rows.map_or(1.0, |scales| scales[task * rows + i].get());
                match self.cols {
                    // The factors are multiplied first, since a single one may overflow the sum.
                    Some(cols) => factors.iter_mut().zip(cols).for_each(|(factor, col)| *factor = row * col.get()),
                    None => factors.fill(row),
                }
                sums.iter_mut().zip(&factors).for_each(|(sum, factor)| *sum = *sum * self.scale * factor);
                if let Some(bias) = self.bias {
                    sums.iter_mut().zip(bias).for_each(|(sum, bias)| *sum += bias);
                }
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Values of many magnitudes, and an infinity.
    fn values(len: usize) -> Vec<f32> {
        let value = |i: usize| ((i * 7919 % 2003) as f32 - 1001.0) * f32::powi(2.0, (i % 23) as i32 - 11);
        let mut values: Vec<f32> = (0..len).map(value).collect();
        values[len / 2] = f32::INFINITY;
        values
    }

    #[test]
    fn transposes_of_any_size() {
        for [rows, cols] in [[0, 3], [1, 1], [1, 200], [200, 1], [64, 128], [63, 65], [130, 259]] {
            let values: Vec<u32> = (0..(rows * cols) as u32).collect();
            let got = transpose(&values, [rows, cols]);
            assert!((0..rows * cols).all(|i| got[i % cols * rows + i / cols] == values[i]), "{rows} {cols}");
            assert_eq!(got.len(), values.len());
        }
    }

    #[test]
    fn bands_are_cast_as_the_whole() {
        for dims @ [rows, cols] in [[1, 1], [3, 70_001], [70_001, 3], [700, 200], [1000, 129], [129, 1000]] {
            let x = values(rows * cols);
            assert!(amax(&x).is_infinite());
            for granularity in [
                Granularity::Tensor,
                Granularity::Row,
                Granularity::Block1x128,
                Granularity::Block128x128,
                Granularity::Block1x32,
            ] {
                let scale_mode = match granularity {
                    Granularity::Block1x32 => ScaleMode::E8m0(Default::default()),
                    _ => ScaleMode::F32,
                };
                for transposed in [false, true] {
                    let cast = Cast { format: Format::E4m3, granularity, scale_mode };
                    let mut want_codes = vec![0; x.len()];
                    let (want_scales, want_amax) =
                        reference::quantize_into(&x, rows, cols, cast, transposed, &mut want_codes);
                    let (codes, scales, amax) = quantize(&x, dims, cast, transposed);
                    let what = format!("{dims:?} {granularity} {transposed}");
                    let bits = |scales: &[Scale]| scales.iter().map(|scale| scale.get().to_bits()).collect::<Vec<_>>();
                    assert_eq!(bits(&scales), bits(&want_scales), "{what}");
                    assert!(codes == want_codes && amax == want_amax, "{what}");
                }
            }
            let scale = Scale::new(0.37);
            let mut want = vec![0; x.len()];
            reference::cast(&x, scale, Format::E5m2, &mut want);
            let codes = encode(&x, scale, Format::E5m2);
            assert!(codes == want);
            let want: Vec<u32> = codes.iter().map(|code| reference::decode(*code, Format::E5m2).to_bits()).collect();
            assert!(decode(&codes, Format::E5m2).iter().map(|value| value.to_bits()).eq(want));
        }
    }
}
