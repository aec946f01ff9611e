//! The loops over all elements, on all cores: the reference's, a band of rows each.
//!
//! Nothing here is generic, so that it is optimized here and not as the user's crate is.

use float8_kernels::{Cast, Format, Granularity, Scale, reference};
use rayon::prelude::*;

/// Elements that one task has at least: they take some ten microseconds.
const TASK: usize = 1 << 15;

/// Max |x|.
pub(super) fn amax(values: &[f32]) -> f32 {
    let parts: Vec<f32> = values.par_chunks(TASK).map(reference::amax).collect();
    reference::amax(&parts)
}

/// Codes under one scale.
pub(super) fn encode(values: &[f32], scale: Scale, format: Format) -> Vec<u8> {
    let mut codes = vec![0; values.len()];
    let tasks = codes.par_chunks_mut(TASK).zip(values.par_chunks(TASK));
    tasks.for_each(|(codes, values)| reference::cast(values, scale, format, codes));
    codes
}

/// [`reference::quantize`], by rows, columns or blocks.
pub(super) fn quantize(
    values: &[f32],
    [rows, cols]: [usize; 2],
    cast: Cast,
    transposed: bool,
) -> (Vec<u8>, Vec<Scale>, f32) {
    if values.is_empty() {
        let made = reference::quantize(values, rows, cols, cast, transposed);
        return (made.codes, made.scales, made.amax);
    }
    let mut codes = vec![0; values.len()];
    // Rows that share scales.
    let height = match transposed {
        true if cast.granularity == Granularity::Row => {
            let (scales, amax) = quantize_columns(values, cols, cast, &mut codes);
            return (codes, scales, amax);
        }
        true => cast.granularity.group(cols, rows)[1],
        false => cast.granularity.group(rows, cols)[0],
    };
    let band = TASK.div_ceil(cols).next_multiple_of(height) * cols;
    let tasks = codes.par_chunks_mut(band).zip(values.par_chunks(band));
    let parts: Vec<(Vec<Scale>, f32)> = tasks
        .map(|(codes, values)| reference::quantize_into(values, values.len() / cols, cols, cast, transposed, codes))
        .collect();
    let amaxes: Vec<f32> = parts.iter().map(|(_, amax)| *amax).collect();
    let scales = if transposed {
        // Each part has, for every group of columns, the scales of its bands.
        let groups = cast.granularity.scale_dims(cols, rows)[0];
        let of_group = |group: usize| {
            parts.iter().flat_map(move |(scales, _)| {
                let bands = scales.len() / groups;
                scales[group * bands..][..bands].iter().copied()
            })
        };
        (0..groups).flat_map(of_group).collect()
    } else {
        parts.into_iter().flat_map(|(scales, _)| scales).collect()
    };
    (codes, scales, reference::amax(&amaxes))
}

/// A scale for each column: their maxima first, then the codes.
fn quantize_columns(values: &[f32], cols: usize, cast: Cast, codes: &mut [u8]) -> (Vec<Scale>, f32) {
    let band = TASK.div_ceil(cols) * cols;
    let parts: Vec<Vec<f32>> = values.par_chunks(band).map(|part| reference::column_amaxes(part, cols)).collect();
    let amaxes = reference::column_amaxes(&parts.concat(), cols);
    let scale = |amax: &f32| reference::amax_to_scale(*amax, cast.format, cast.scale_mode);
    let scales: Vec<Scale> = amaxes.iter().map(scale).collect();
    let tasks = codes.par_chunks_mut(band).zip(values.par_chunks(band));
    tasks.for_each(|(codes, values)| reference::cast_columns(values, &scales, cast.format, codes));
    (scales, reference::amax(&amaxes))
}

/// The exact values of codes, unscaled.
pub(super) fn decode(codes: &[u8], format: Format) -> Vec<f32> {
    let mut values = vec![0.0; codes.len()];
    let tasks = values.par_chunks_mut(TASK).zip(codes.par_chunks(TASK));
    tasks.for_each(|(values, codes)| reference::decode_slice(codes, format, values));
    values
}

/// A scale by two indices.
type ScaleOf<'a> = &'a (dyn Fn(usize, usize) -> f32 + Sync);

/// Multiplies `values [_, cols]` by `scale(row, block)`, a block being `width` columns of one row.
pub(super) fn scale_blocks(values: &mut [f32], cols: usize, width: usize, scale: ScaleOf<'_>) {
    let rows = TASK.div_ceil(cols);
    values.par_chunks_mut(rows * cols).enumerate().for_each(|(band, values)| {
        for (r, row) in values.chunks_exact_mut(cols).enumerate() {
            for (block, values) in row.chunks_mut(width).enumerate() {
                let scale = scale(band * rows + r, block);
                values.iter_mut().for_each(|value| *value *= scale);
            }
        }
    });
}

/// Multiplies `values [_, cols]` by `scale(block, col)`, a block being `height` rows of one column.
pub(super) fn scale_columns(values: &mut [f32], cols: usize, height: usize, scale: ScaleOf<'_>) {
    values.par_chunks_mut(height * cols).enumerate().for_each(|(band, values)| {
        let scales: Vec<f32> = (0..cols).map(|c| scale(band, c)).collect();
        for row in values.chunks_exact_mut(cols) {
            row.iter_mut().zip(&scales).for_each(|(value, scale)| *value *= scale);
        }
    });
}

#[cfg(test)]
mod tests {
    use float8_kernels::ScaleMode;

    use super::*;

    /// Values of many magnitudes, and an infinity.
    fn values(len: usize) -> Vec<f32> {
        let value = |i: usize| ((i * 7919 % 2003) as f32 - 1001.0) * f32::powi(2.0, (i % 23) as i32 - 11);
        let mut values: Vec<f32> = (0..len).map(value).collect();
        values[len / 2] = f32::INFINITY;
        values
    }

    #[test]
    fn bands_are_cast_as_the_whole() {
        for dims @ [rows, cols] in [[1, 1], [3, 70_001], [70_001, 3], [700, 200], [1000, 129], [129, 1000]] {
            let x = values(rows * cols);
            assert!(amax(&x).is_infinite());
            for granularity in
                [Granularity::Row, Granularity::Block1x128, Granularity::Block128x128, Granularity::Block1x32]
            {
                let scale_mode = match granularity {
                    Granularity::Block1x32 => ScaleMode::E8m0(Default::default()),
                    _ => ScaleMode::F32,
                };
                for transposed in [false, true] {
                    let cast = Cast { format: Format::E4m3, granularity, scale_mode };
                    let want = reference::quantize(&x, rows, cols, cast, transposed);
                    let (codes, scales, amax) = quantize(&x, dims, cast, transposed);
                    let what = format!("{dims:?} {granularity} {transposed}");
                    let bits = |scales: &[Scale]| scales.iter().map(|scale| scale.get().to_bits()).collect::<Vec<_>>();
                    assert_eq!(bits(&scales), bits(&want.scales), "{what}");
                    assert!(codes == want.codes && amax == want.amax, "{what}");
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
