//! Checks GEMMs on codes of -1, 0 and 1 with power-of-two scales. Every sum is exact on every path,
//! so results must equal the scalar reference bit for bit.
//!
//! Scales differ from adjacent ones and from earlier rounds of a ring, tiles are ragged, and there
//! are a bias and an empty group. The first row of each operand is dense, so that sums use most of
//! the 14 bits of an accumulator. A NaN code, and in e5m2 an infinity, reach a whole row and a whole
//! column.

use core::ops::Range;

use cubecl::prelude::*;

use super::{Flaw, floats, in_dtype, read, split_mix, upload_operand};
use crate::element_type::ElementType;
use crate::gemm::{GemmProblem, GemmVariant};
use crate::granularity::{BLOCK, MX_BLOCK};
use crate::reference::{HostOperand, encode, grouped_scaled_gemm_f64, scaled_gemm_f64};
use crate::{Format, GemmArgs, GemmConfig, GemmShape, Granularity, Grouping, Groups, InvScale, VectorView};

/// Ends of three groups: the first inside a block, the second empty, the third before the end of
/// the axis.
fn group_ends(len: usize) -> [i32; 3] {
    let first = len as i32 / 3 + 1;
    [first, first, len as i32 - 3]
}

/// An operand on the host.
struct Matrix {
    codes: Vec<u8>,
    inv_scales: Vec<InvScale>,
    rows: usize,
    k: usize,
    format: Format,
    granularity: Granularity,
}

/// Rows of an operand with a code that is not finite, and its column.
#[derive(Clone, Copy)]
struct Special {
    nan_row: usize,
    infinity_row: usize,
    col: usize,
}

impl Matrix {
    /// Operand 0 (A) or 1 (B) of `rows` rows, zero outside `spans` of the contraction.
    fn new(
        problem: &GemmProblem,
        side: usize,
        rows: usize,
        spans: &[Range<usize>],
        special: Special,
        seed: u64,
    ) -> Self {
        let GemmShape { product: [_, _, k], granularities, .. } = problem.shape;
        let (format, granularity) = (problem.formats[side], granularities[side]);
        let one = encode(1.0, format);
        // The largest product is 16 times the smallest with block scales.
        let density = if Granularity::any_blocks(granularities) || Granularity::any_mx(granularities) { 4 } else { 1 };
        let code = |i: usize| {
            let (row, col) = (i / k, i % k);
            let bits = split_mix(seed + side as u64, i as u64);
            let is_kept = match (row, side) {
                (0, _) if !split_mix(seed + 2, col as u64).is_multiple_of(density) => false,
                (0, 0) => return one,
                (0, _) => return if col % 128 == 5 { 0 } else { one },
                (_, 0) => bits.is_multiple_of(8),
                _ => !bits.is_multiple_of(3),
            };
            if is_kept { one | [0, 0x80][(bits >> 40) as usize % 2] } else { 0 }
        };
        let is_inside = |col| spans.iter().any(|span| span.contains(&col));
        let mut codes: Vec<u8> = (0..rows * k).map(|i| if is_inside(i % k) { code(i) } else { 0 }).collect();
        // With few rows, NaN and infinity would leave few finite results.
        if rows > 8 {
            codes[special.nan_row * k + special.col] = 0x7f;
            if format == Format::E5m2 {
                codes[special.infinity_row * k + special.col] = 0x7c;
            }
        }
        let exponents = exponents(granularities, side, rows, k, seed);
        let inv_scales = exponents.into_iter().map(|exponent| InvScale::new(2f32.powi(exponent))).collect();
        Self { codes, inv_scales, rows, k, format, granularity }
    }

    /// The operand for the scalar reference.
    fn host(&self) -> HostOperand<'_> {
        let &Self { ref codes, ref inv_scales, rows, k, format, granularity } = self;
        HostOperand { codes, rows, k, format, granularity, inv_scales }
    }
}

/// Sequence of `len` numbers below `count`. Adjacent ones differ, and it has no period.
fn walk(seed: u64, len: usize, count: u64) -> Vec<i32> {
    let step = |at: &mut u64, i: usize| {
        let now = *at;
        *at = (now + 1 + (split_mix(seed, i as u64) >> 32) % (count - 1)) % count;
        Some(now as i32)
    };
    (0..len).scan(0, step).collect()
}

/// Exponents of the inverse scales of operand 0 (A) or 1 (B).
///
/// Adjacent scales differ. If both operands have block scales, no two blocks of 128 of a row have
/// the same, so that a scale of any earlier round of a ring is wrong. The products of both scales
/// are 1 to 16.
fn exponents(granularities: [Granularity; 2], side: usize, rows: usize, k: usize, seed: u64) -> Vec<i32> {
    let granularity = granularities[side];
    let [height, width] = granularity.scale_dims(rows, k);
    let count = if granularity == Granularity::Row { 5 } else { 3 };
    let [of_row, of_block] = [height, width].map(|len| walk(seed + side as u64 + len as u64, len, count));
    let have_blocks = granularities.iter().all(|one| !matches!(one, Granularity::Tensor | Granularity::Row));
    let blocks = if granularity.is_mx() { BLOCK / MX_BLOCK } else { 1 };
    let exponent = |i: usize| {
        let (row, block) = (i / width, i % width);
        match granularity {
            Granularity::Tensor => [1, -2][side],
            Granularity::Row => of_row[row] - 2,
            _ => {
                // The operands' opposite factors cancel.
                let opposite = if have_blocks { [3, -3][side] * (block / blocks) as i32 } else { 0 };
                (of_row[row] + of_block[block]) % 3 + opposite
            }
        }
    };
    (0..height * width).map(exponent).collect()
}

/// Arguments of a GEMM on the host.
struct HostGemm {
    a: Matrix,
    b: Matrix,
    bias: Vec<f32>,
    ends: [i32; 3],
}

impl HostGemm {
    fn new(problem: &GemmProblem, seed: u64) -> Self {
        let ([m, n, k], grouping) = (problem.shape.product, problem.shape.grouping());
        let whole = core::iter::once(0..k).collect();
        let (ends, rows_b, spans, col) = match grouping {
            Some(Grouping::Rows) => (group_ends(m), 3 * n, whole, k - 1),
            Some(grouping) => (group_ends(k), n, grouping.spans(&group_ends(k), k), k - 4),
            None => (group_ends(k), n, whole, k - 1),
        };
        let special = Special { nan_row: m / 2, infinity_row: m / 3, col };
        let a = Matrix::new(problem, 0, m, &spans, special, seed);
        // In the matrices of the first and the last group, which have rows.
        let infinity_row = if grouping == Some(Grouping::Rows) { 2 * n + n / 3 } else { n / 3 };
        let b = Matrix::new(problem, 1, rows_b, &spans, Special { nan_row: n / 2, infinity_row, col }, seed);
        let bias = (0..n).map(|col| (col * 7 % 9) as f32 / 2.0 - 2.0).collect();
        Self { a, b, bias, ends }
    }

    /// Result of the scalar reference.
    fn result(&self, problem: &GemmProblem) -> Vec<f32> {
        let (left, right) = (self.a.host(), self.b.host());
        let sums = match problem.shape.grouping() {
            None => scaled_gemm_f64(&left, &right, problem.bias.map(|_| &self.bias[..])),
            Some(grouping) => grouped_scaled_gemm_f64(&left, &right, &self.ends, grouping),
        };
        sums.into_iter().map(|sum| sum as f32).collect()
    }
}

pub(super) fn judge<R: Runtime>(variant: &GemmVariant, client: &ComputeClient<R>, seed: u64) -> Result<(), Flaw> {
    judge_changed(variant, client, seed, |_| {})
}

/// Runs [`judge`] with arguments that `change` modifies after the reference has read them.
/// Simulates a faulty kernel.
fn judge_changed<R: Runtime>(
    variant: &GemmVariant,
    client: &ComputeClient<R>,
    seed: u64,
    change: impl FnOnce(&mut HostGemm),
) -> Result<(), Flaw> {
    let problem = &variant.small;
    let GemmProblem { shape, bias: bias_dtype, dtype, .. } = *problem;
    let [_, n, _] = shape.product;
    let mut host = HostGemm::new(problem, seed);
    let (_, want) = in_dtype(&host.result(problem), dtype)?;
    change(&mut host);
    let bias_view = bias_dtype.map(|dtype| {
        let (bytes, _) = in_dtype(&host.bias, dtype)?;
        Ok::<_, Flaw>(VectorView { handle: client.create_from_slice(&bytes), len: n, stride: 1, dtype })
    });
    let ends = client.create_from_slice(&host.ends.map(i32::to_le_bytes).concat());
    let groups = problem.shape.grouping().map(|grouping| Groups { ends, count: 3, grouping });
    // NaN in every element, to detect ones that are not written.
    let out = client.create_from_slice(&vec![0xff; want.len() * ElementType::of(dtype)?.size()]);
    let [left, right] = [&host.a, &host.b].map(|matrix| upload_operand(client, &matrix.host(), shape.power_of_two));
    let (bias, config) = (bias_view.transpose()?, GemmConfig { use_fast_accum: shape.use_fast_accum, emulate: false });
    let args = GemmArgs { a: &left, b: &right, bias: bias.as_ref(), groups: groups.as_ref(), dtype, config };
    args.run_into(client, Some(variant), &out)?;
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
    use crate::{GemmDevice, select};

    const GROUPINGS: [Option<Grouping>; 3] = [None, Some(Grouping::Rows), Some(Grouping::Contraction)];

    /// Granularity of B for one of A.
    fn granularities(left: Granularity) -> [Granularity; 2] {
        [left, if left == Granularity::Block1x128 { Granularity::Block128x128 } else { left }]
    }

    fn problem(left: Granularity, grouping: Option<Grouping>) -> GemmProblem {
        let shape = GemmShape {
            product: [300, 300, 1000],
            granularities: granularities(left),
            power_of_two: true,
            use_fast_accum: false,
            groups: grouping.map(|grouping| (grouping, 3)),
        };
        let dtype = ElementType::F32.storage();
        let bias = grouping.is_none().then_some(dtype);
        GemmProblem { formats: [Format::E4m3, Format::E5m2], shape, bias, dtype, emulate: false }
    }

    /// Checks the variant of this granularity of A on wgpu, after `change`.
    fn judged(
        left: Granularity,
        grouping: Option<Grouping>,
        change: impl FnOnce(&mut HostGemm),
    ) -> Option<Result<(), Flaw>> {
        let client = std::panic::catch_unwind(|| WgpuRuntime::client(&Default::default())).ok()?;
        let device = GemmDevice::of(&client);
        let variant = select(&device, &problem(left, grouping), &device.disabled()).expect("no kernel is disabled");
        Some(judge_changed(&variant, &client, 7, change))
    }

    /// Checks that the fault is found, for each way to group.
    fn is_noticed(left: Granularity, groupings: &[Option<Grouping>], change: impl Fn(&mut HostGemm)) {
        for &grouping in groupings {
            let Some(judged) = judged(left, grouping, &change) else {
                return test_data::skip(test_data::VULKAN);
            };
            assert!(matches!(judged, Err(Flaw::Wrong(_))), "{left}, {grouping:?}: {judged:?}");
        }
    }

    #[test]
    fn what_nothing_changes_is_right() {
        for (granularity, grouping) in Granularity::ALL.into_iter().flat_map(|one| GROUPINGS.map(|by| (one, by))) {
            if let Some(judged) = judged(granularity, grouping, |_| {}) {
                assert_eq!(judged, Ok(()), "{granularity}, {grouping:?}");
            }
        }
    }

    #[test]
    fn a_dropped_stage_is_noticed() {
        for granularity in Granularity::ALL {
            let groupings = if granularity == Granularity::Row { &GROUPINGS[..] } else { &GROUPINGS[..1] };
            is_noticed(granularity, groupings, |host| {
                host.a.codes.chunks_exact_mut(host.a.k).for_each(|row| row[128..160].fill(0));
            });
        }
    }

    #[test]
    fn the_scale_of_a_neighbour_is_noticed() {
        for granularity in [Granularity::Row, Granularity::Block1x128, Granularity::Block1x32] {
            is_noticed(granularity, &GROUPINGS, |host| host.a.inv_scales.swap(2, 3));
            is_noticed(granularity, &GROUPINGS[..1], |host| host.a.inv_scales.rotate_left(1));
            is_noticed(granularity, &GROUPINGS[1..2], |host| host.b.inv_scales.rotate_left(1));
        }
    }

    /// The kernel reads a scale that a stage had one round of the ring before, of one operand or of
    /// both.
    #[test]
    fn the_scale_of_an_earlier_round_is_noticed() {
        let stale = |matrix: &mut Matrix, blocks: usize| {
            let width = matrix.granularity.scale_dims(matrix.rows, matrix.k)[1];
            for row in matrix.inv_scales.chunks_exact_mut(width) {
                row.copy_within(..width - blocks, blocks);
            }
        };
        is_noticed(Granularity::Block1x128, &GROUPINGS, |host| stale(&mut host.a, 3));
        is_noticed(Granularity::Block1x128, &GROUPINGS[..1], |host| stale(&mut host.b, 4));
        for stages in [1, 3, 4] {
            is_noticed(Granularity::Block1x32, &GROUPINGS[..1], |host| {
                stale(&mut host.a, 4 * stages);
                stale(&mut host.b, 4 * stages);
            });
        }
    }

    #[test]
    fn a_wrong_row_map_is_noticed() {
        is_noticed(Granularity::Tensor, &GROUPINGS, |host| host.a.codes.rotate_left(8 * host.a.k));
        // A tile takes the matrix of the next group, or a group ends early.
        let [_, rows, contraction] = GROUPINGS;
        is_noticed(Granularity::Tensor, &[rows], |host| host.b.codes.rotate_left(host.b.k * host.b.rows / 3));
        is_noticed(Granularity::Tensor, &[rows], |host| host.ends[0] -= 1);
        is_noticed(Granularity::Tensor, &[contraction], |host| host.ends[0] -= BLOCK as i32);
    }

    #[test]
    fn a_bias_left_out_is_noticed() {
        is_noticed(Granularity::Tensor, &GROUPINGS[..1], |host| host.bias.fill(0.0));
    }

    /// NaN and infinity reach the results of a group.
    #[test]
    fn groups_have_results_that_are_not_finite() {
        for grouping in GROUPINGS {
            let problem = problem(Granularity::Tensor, grouping);
            let mut host = HostGemm::new(&problem, 7);
            // A's NaN would hide an infinity of B.
            for code in &mut host.a.codes {
                *code = if *code == 0x7f { 0 } else { *code };
            }
            let result = host.result(&problem);
            assert!(
                result.iter().any(|sum| sum.is_nan()) && result.iter().any(|sum| sum.is_infinite()),
                "{grouping:?}"
            );
        }
    }

    /// Scales of a row and of adjacent rows, at every distance that a ring can have.
    #[test]
    fn scales_differ() {
        const K: usize = 36 * BLOCK - 37;
        for (left, side) in [
            (Granularity::Row, 0),
            (Granularity::Block1x128, 0),
            (Granularity::Block1x128, 1),
            (Granularity::Block1x32, 1),
        ] {
            let granularities = granularities(left);
            let [height, width] = granularities[side].scale_dims(300, K);
            let exponents = exponents(granularities, side, 300, K, 7);
            let at = |row: usize, block: usize| exponents[row * width + block];
            for (row, block) in (0..height).flat_map(|row| (0..width).map(move |block| (row, block))) {
                assert!(row == 0 || at(row, block) != at(row - 1, block), "{granularities:?} [{row}, {block}]");
                assert!(block == 0 || at(row, block) != at(row, block - 1), "{granularities:?} [{row}, {block}]");
                let stage = if granularities[side].is_mx() { BLOCK / MX_BLOCK } else { 1 };
                let is_repeated = (0..block / stage * stage).any(|earlier| at(row, block) == at(row, earlier));
                assert!(!is_repeated, "{granularities:?} [{row}, {block}]");
            }
        }
    }

    /// Any partial sum is below 2¹³ times the smallest product.
    #[test]
    fn sums_are_exact_in_14_bits() {
        for left in Granularity::ALL {
            let mut problem = problem(left, None);
            problem.shape.product = [20, 20, 36 * BLOCK - 37];
            let HostGemm { a, b, .. } = HostGemm::new(&problem, 7);
            let [left, right] = [&a, &b].map(|matrix| matrix.host().values());
            let products = |i: usize, j: usize| {
                let pairs = left.chunks_exact(a.k).nth(i).into_iter().flatten().zip(&right[j * a.k..]);
                pairs.map(|(x, y)| (x * y).abs()).filter(|product| *product > 0.0 && product.is_finite())
            };
            for (i, j) in (0..20).flat_map(|i| (0..20).map(move |j| (i, j))) {
                let smallest = products(i, j).fold(f64::INFINITY, f64::min);
                assert!(products(i, j).sum::<f64>() < 8192.0 * smallest, "{problem:?} [{i}, {j}]");
            }
        }
    }
}
