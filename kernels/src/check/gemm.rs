//! Checks GEMMs on codes of -1, 0 and 1 with power-of-two scales. Every sum is exact on every path,
//! so results must equal the scalar reference bit for bit.
//!
//! Adjacent scales differ, tiles are ragged, and there are a bias and an empty group. The first row
//! of each operand is dense, so that sums use all 14 bits of an accumulator. A NaN code, and in
//! e5m2 an infinity, reach a whole row and a whole column.

use core::ops::Range;

use cubecl::prelude::*;

use super::{Flaw, floats, in_dtype, read, split_mix, upload_operand};
use crate::gemm::{GemmProblem, GemmVariant};
use crate::reference::{HostOperand, encode, grouped_scaled_gemm_f64, scaled_gemm_f64};
use crate::source::Source;
use crate::{Format, GemmArgs, GemmConfig, Granularity, Grouping, Groups, InvScale, Output, VectorView};

/// Ends of three groups: the first inside a block, the second empty, the third before the end of
/// the axis.
fn group_ends(len: usize) -> [i32; 3] {
    let first = len as i32 / 3 + 1;
    [first, first, len as i32 - 3]
}

/// Contraction length, format and granularity of an operand.
const fn operand(variant: &GemmVariant, side: usize) -> (usize, Format, Granularity) {
    let GemmProblem { formats, shape, .. } = &variant.small;
    (shape.product[2], formats[side], shape.granularities[side])
}

/// An operand on the host.
struct Matrix {
    codes: Vec<u8>,
    inv_scales: Vec<InvScale>,
    rows: usize,
}

impl Matrix {
    /// The left or right operand, zero outside `spans` of the contraction. NaN and infinity are in
    /// column `special`.
    fn new(
        variant: &GemmVariant,
        side: usize,
        rows: usize,
        (spans, special): (&[Range<usize>], usize),
        seed: u64,
    ) -> Self {
        let (k, format, granularity) = operand(variant, side);
        let one = encode(1.0, format);
        let code = |i: usize| {
            let (row, col) = (i / k, i % k);
            let sign = [0, 0x80][(split_mix(seed, i as u64) >> 40) as usize % 2];
            let is_kept = match (row, side) {
                (0, 0) => return one,
                (0, _) => return if col % 128 == 5 { 0 } else { one },
                (_, 0) => split_mix(seed, i as u64).is_multiple_of(8),
                _ => !split_mix(seed, i as u64).is_multiple_of(3),
            };
            if is_kept { one | sign } else { 0 }
        };
        let mut codes: Vec<u8> = (0..rows * k).map(code).collect();
        for row in codes.chunks_exact_mut(k) {
            for (col, code) in row.iter_mut().enumerate() {
                *code = if spans.iter().any(|span| span.contains(&col)) { *code } else { 0 };
            }
        }
        // With few rows, NaN and infinity would leave few finite results.
        if rows > 8 {
            codes[rows / 2 * k + special] = 0x7f;
            if format == Format::E5m2 {
                codes[rows / 3 * k + special] = 0x7c;
            }
        }
        let [height, width] = granularity.scale_dims(rows, k);
        let scale = |i: usize| {
            let (row, block) = (i / width, i % width);
            2f32.powi(match granularity {
                Granularity::Tensor => [1, -2][side],
                Granularity::Row => (3 * row as i32) % 5 - 2,
                _ => (row + block) as i32 % 3,
            })
        };
        Self { codes, inv_scales: (0..height * width).map(|i| InvScale::new(scale(i))).collect(), rows }
    }

    /// The operand for the scalar reference.
    fn host(&self, variant: &GemmVariant, side: usize) -> HostOperand<'_> {
        let (k, format, granularity) = operand(variant, side);
        HostOperand { codes: &self.codes, rows: self.rows, k, format, granularity, inv_scales: &self.inv_scales }
    }
}

pub(super) fn judge<R: Runtime>(variant: &GemmVariant, client: &ComputeClient<R>, seed: u64) -> Result<(), Flaw> {
    judge_changed(variant, client, seed, |_| {})
}

/// Runs [`judge`] with operands that `change` modifies after the reference has read them. Simulates
/// a faulty kernel.
fn judge_changed<R: Runtime>(
    variant: &GemmVariant,
    client: &ComputeClient<R>,
    seed: u64,
    change: impl FnOnce((&mut Matrix, &mut Vec<f32>)),
) -> Result<(), Flaw> {
    let GemmProblem { shape, bias: bias_dtype, dtype, .. } = variant.small;
    let ([m, n, k], grouping) = (shape.product, shape.groups.map(|(grouping, _)| grouping));
    let whole = core::iter::once(0..k).collect();
    let (ends, rows_b, spans, special) = match grouping {
        Some(Grouping::Rows) => (group_ends(m), 3 * n, whole, k - 1),
        Some(grouping) => (group_ends(k), n, grouping.spans(&group_ends(k), k), k - 4),
        None => (group_ends(k), n, whole, k - 1),
    };
    let mut a = Matrix::new(variant, 0, m, (&spans, special), seed);
    let b = Matrix::new(variant, 1, rows_b, (&spans, special), seed + 1);

    let mut bias: Vec<f32> = (0..n).map(|col| (col * 7 % 9) as f32 / 2.0 - 2.0).collect();
    let (left, right) = (a.host(variant, 0), b.host(variant, 1));
    let want = match grouping {
        None => scaled_gemm_f64(&left, &right, bias_dtype.map(|_| &bias[..])),
        Some(grouping) => grouped_scaled_gemm_f64(&left, &right, &ends, grouping),
    };
    let want: Vec<f32> = want.into_iter().map(|sum| sum as f32).collect();
    let (_, want) = in_dtype(&want, dtype)?;
    change((&mut a, &mut bias));
    let bias_view = bias_dtype.map(|dtype| {
        let (bytes, _) = in_dtype(&bias, dtype)?;
        Ok::<_, Flaw>(VectorView { handle: client.create_from_slice(&bytes), len: n, stride: 1, dtype })
    });

    let ends = client.create_from_slice(&ends.map(i32::to_le_bytes).concat());
    let groups = grouping.map(|grouping| Groups { ends, count: 3, grouping });
    // NaN in every element, to detect ones that are not written.
    let out = client.create_from_slice(&vec![0xff; want.len() * Source::of(dtype)?.size()]);
    let [left, right] = [(&a, 0), (&b, 1)]
        .map(|(matrix, side)| upload_operand(client, &matrix.host(variant, side), shape.power_of_two));
    let (bias, config) = (bias_view.transpose()?, GemmConfig { use_fast_accum: shape.use_fast_accum, emulate: false });
    let args = GemmArgs { a: &left, b: &right, bias: bias.as_ref(), groups: groups.as_ref(), dtype, config };
    let output = Output { handle: out.clone(), dtype, accumulate: false };
    args.launch(client, Some(variant), &output)?;
    let got = floats(&read(client, &[&out])?[0], dtype)?;
    let differs = |(got, want): (&f32, &f32)| got != want && !(got.is_nan() && want.is_nan());
    let count = got.iter().zip(&want).filter(|pair| differs(*pair)).count();
    match got.iter().zip(&want).position(differs) {
        None => Ok(()),
        Some(i) => {
            let (got, want) = (got[i], want[i]);
            Err(Flaw::Wrong(format!("[{}, {}] is {got:e}, not {want:e}; {count} elements differ", i / n, i % n)))
        }
    }
}

#[cfg(test)]
mod tests {
    use cubecl::wgpu::WgpuRuntime;

    use super::*;
    use crate::{GemmDevice, GemmShape, select};

    /// Checks the variant of this granularity of A on wgpu, after `change`.
    fn judged(left: Granularity, change: impl FnOnce((&mut Matrix, &mut Vec<f32>))) -> Option<Result<(), Flaw>> {
        let client = std::panic::catch_unwind(|| WgpuRuntime::client(&Default::default())).ok()?;
        let granularities = [left, if left == Granularity::Block1x128 { Granularity::Block128x128 } else { left }];
        let product = [300, 300, 1000];
        let like = GemmShape { product, granularities, power_of_two: true, use_fast_accum: false, groups: None };
        let dtype = Source::F32.storage();
        let problem = GemmProblem { formats: [Format::E4m3; 2], shape: like, bias: Some(dtype), dtype, emulate: false };
        let device = GemmDevice::of(&client);
        let variant = select(&device, &problem, &device.disabled()).expect("no kernel is disabled");
        Some(judge_changed(&variant, &client, 7, change))
    }

    fn is_noticed(left: Granularity, change: impl FnOnce((&mut Matrix, &mut Vec<f32>))) {
        let Some(judged) = judged(left, change) else { return eprintln!("skipped: no adapter for wgpu") };
        assert!(matches!(judged, Err(Flaw::Wrong(_))), "{judged:?}");
    }

    #[test]
    fn what_nothing_changes_is_right() {
        for granularity in Granularity::ALL {
            if let Some(judged) = judged(granularity, |_| {}) {
                assert_eq!(judged, Ok(()), "{granularity}");
            }
        }
    }

    #[test]
    fn a_dropped_stage_is_noticed() {
        for granularity in Granularity::ALL {
            is_noticed(granularity, |(a, _)| {
                let k = a.codes.len() / a.rows;
                a.codes.chunks_exact_mut(k).for_each(|row| row[128..160].fill(0));
            });
        }
    }

    #[test]
    fn the_scale_of_a_neighbour_is_noticed() {
        for granularity in [Granularity::Row, Granularity::Block1x128, Granularity::Block1x32] {
            is_noticed(granularity, |(a, _)| a.inv_scales.swap(2, 3));
            is_noticed(granularity, |(a, _)| a.inv_scales.rotate_left(1));
        }
    }

    #[test]
    fn a_wrong_row_map_is_noticed() {
        is_noticed(Granularity::Tensor, |(a, _)| {
            let k = a.codes.len() / a.rows;
            a.codes.rotate_left(8 * k);
        });
    }

    #[test]
    fn a_bias_left_out_is_noticed() {
        is_noticed(Granularity::Tensor, |(_, bias)| bias.fill(0.0));
    }
}
