//! The grouped GEMM against a dense GEMM for each group, and against f64.

use float8_kernels::{
    Format, GROUP_ALIGN, GemmConfig, Granularity, Grouping, Groups, KernelError, Operand, grouped_scaled_gemm,
    reference, scaled_gemm,
};
use proptest::prelude::*;
use rstest::rstest;

use crate::common::*;
use crate::gemm::magnitudes;

fn groups(client: &Client, ends: &[usize], grouping: Grouping) -> Groups {
    let ends: Vec<u32> = ends.iter().map(|&end| end as u32).collect();
    let count = ends.len();
    let bytes: Vec<u8> = ends.iter().flat_map(|end| end.to_le_bytes()).collect();
    Groups { ends: client.create_from_slice(&bytes), count, grouping }
}

fn grouped(client: &Client, a: &Operand, b: &Operand, groups: &Groups) -> Vec<f32> {
    read_f32(client, grouped_scaled_gemm(client, a, b, groups, F32, GemmConfig::default()).unwrap())
}

/// Rows `from..to` of an operand, with their own scales.
fn rows(matrix: &HostMatrix, from: usize, to: usize) -> HostMatrix {
    let [_, k] = matrix.shape;
    let inv_scales = match matrix.granularity {
        Granularity::Tensor => matrix.inv_scales.clone(),
        Granularity::Block128x128 => unreachable!("its squares straddle groups"),
        granularity => {
            let [_, width] = granularity.scale_dims(1, k);
            matrix.inv_scales[from * width..to * width].to_vec()
        }
    };
    HostMatrix { codes: matrix.codes[from * k..to * k].to_vec(), inv_scales, shape: [to - from, k], ..matrix.clone() }
}

/// Columns `from..to` of the contraction, `from` a multiple of 128.
fn columns(matrix: &HostMatrix, from: usize, to: usize) -> HostMatrix {
    let [rows, k] = matrix.shape;
    let [height, width] = matrix.granularity.scale_dims(rows, k);
    let [_, kept] = matrix.granularity.scale_dims(rows, to - from);
    let first = match matrix.granularity {
        Granularity::Tensor | Granularity::Row => 0,
        Granularity::Block1x32 => from / 32,
        Granularity::Block1x128 | Granularity::Block128x128 => from / 128,
    };
    HostMatrix {
        codes: (0..rows).flat_map(|r| matrix.codes[r * k + from..r * k + to].to_vec()).collect(),
        inv_scales: (0..height).flat_map(|r| matrix.inv_scales[r * width + first..][..kept].to_vec()).collect(),
        shape: [rows, to - from],
        ..matrix.clone()
    }
}

fn dense(client: &Client, a: &HostMatrix, b: &HostMatrix) -> Vec<f32> {
    let config = GemmConfig { emulate: true, ..GemmConfig::default() };
    read_f32(client, scaled_gemm(client, &a.upload(client), &b.upload(client), None, F32, config).unwrap())
}

/// Within f32 rounding of each other, by the size of the terms.
fn assert_close(got: &[f32], want: &[f32], a: &HostMatrix, b: &HostMatrix, what: &str) {
    assert_eq!(got.len(), want.len(), "{what}");
    let size = reference::scaled_gemm_f64(&magnitudes(a).view(), &magnitudes(b).view(), None);
    for (i, ((got, want), size)) in got.iter().zip(want).zip(size).enumerate() {
        let bound = 2.0 * (a.shape[1] + 8) as f64 * 2f64.powi(-24) * size;
        assert!(f64::from(got - want).abs() <= bound, "{what} element {i}: {got}, not {want}");
    }
}

fn check_rows(client: &Client, ends: &[usize], [m, n, k]: [usize; 3], [left, right]: [Granularity; 2], seed: u64) {
    let a = HostMatrix::random([m, k], Format::E4m3, left, seed);
    let b = HostMatrix::random([ends.len() * n, k], Format::E5m2, right, seed + 1);
    let got = grouped(client, &a.upload(client), &b.upload(client), &groups(client, ends, Grouping::Rows));
    assert_eq!(got.len(), m * n);
    let mut start = 0;
    for (g, &end) in ends.iter().enumerate() {
        if end > start {
            let (a, b) = (rows(&a, start, end), rows(&b, g * n, (g + 1) * n));
            let what = format!("{left} by {right} {ends:?} group {g}");
            assert_close(&got[start * n..end * n], &dense(client, &a, &b), &a, &b, &what);
        }
        start = start.max(end);
    }
    assert!(got[start * n..].iter().all(|&x| x == 0.0), "rows of no group");
}

fn check_contraction(client: &Client, sizes: &[usize], [m, n]: [usize; 2], granularities: [Granularity; 2], seed: u64) {
    // Where each group begins and ends, and the length of all with some left over.
    let (mut spans, mut at) = (vec![], 0);
    for size in sizes {
        spans.push((at, at + size));
        at = (at + size).next_multiple_of(GROUP_ALIGN);
    }
    // Some left over, or an empty group that begins where all ends.
    let k = if sizes.last() == Some(&0) { at.max(1) } else { at + 5 };
    let [a, b] = [(m, 0), (n, 1)].map(|(rows, i)| {
        let mut matrix = HostMatrix::random([rows, k], FORMATS[i], granularities[i], seed + i as u64);
        for (c, code) in matrix.codes.iter_mut().enumerate() {
            let c = c % k;
            if !spans.iter().any(|(start, end)| (*start..*end).contains(&c)) {
                *code = 0;
            }
        }
        matrix
    });
    let ends: Vec<usize> = spans.iter().map(|(_, end)| *end).collect();
    let groups = groups(client, &ends, Grouping::Contraction);
    let got = grouped(client, &a.upload(client), &b.upload(client), &groups);
    assert_eq!(got.len(), sizes.len() * m * n);
    for (g, (got, &(start, end))) in got.chunks(m * n).zip(&spans).enumerate() {
        if start == end {
            assert!(got.iter().all(|&x| x == 0.0), "the empty group {g}");
            continue;
        }
        let (a, b) = (columns(&a, start, end), columns(&b, start, end));
        let what = format!("{granularities:?} {sizes:?} group {g}");
        assert_close(got, &dense(client, &a, &b), &a, &b, &what);
    }
}

/// Full tiles, empty groups at either end and between, single rows, and rows that no group has.
#[rstest]
fn rows_of_groups(#[values(&[64, 128], &[0, 1, 1, 70, 70, 133], &[150], &[0, 0], &[100, 131, 140])] ends: &[usize]) {
    let Some(client) = client() else { return };
    for granularity in [Granularity::Tensor, Granularity::Row, Granularity::Block1x32] {
        check_rows(&client, ends, [150, 67, 100], [granularity; 2], 7);
    }
    check_rows(&client, ends, [150, 40, 160], [Granularity::Block1x32, Granularity::Row], 8);
    check_rows(&client, ends, [150, 40, 160], [Granularity::Block1x128, Granularity::Tensor], 9);
}

#[rstest]
fn contractions_of_groups(#[values(&[64, 128], &[0, 1, 0, 130, 0], &[300], &[0, 0], &[100, 31, 140])] sizes: &[usize]) {
    let Some(client) = client() else { return };
    for (i, left) in GRANULARITIES.into_iter().enumerate() {
        check_contraction(&client, sizes, [67, 33], [left, GRANULARITIES[(i + 4) % 5]], 11);
        check_contraction(&client, sizes, [5, 70], [left; 2], 13);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn any_groups(
        sizes in proptest::collection::vec(0usize..150, 1..7),
        left in 0usize..20,
        n in 1usize..90,
        seed in 0u64..1000,
    ) {
        let Some(client) = client() else { return Ok(()) };
        let ends: Vec<usize> = sizes.iter().scan(0, |at, size| { *at += size; Some(*at) }).collect();
        let m = (ends.last().unwrap() + left).max(1);
        check_rows(&client, &ends, [m, n, 96], [Granularity::Block1x32; 2], seed);
        check_contraction(&client, &sizes, [n, 17], [Granularity::Block1x32; 2], seed);
    }
}

/// Groups of more rows of tiles than are gone through together, against the reference.
#[rstest]
fn bands_of_tiles(
    #[values(Grouping::Rows, Grouping::Contraction)] grouping: Grouping,
    #[values(Granularity::Row, Granularity::Block1x32)] granularity: Granularity,
) {
    let Some(client) = client() else { return };
    let ends = [70, 70, 1200, 1300];
    // Rows of both, and the contraction.
    let [m, n, k] = match grouping {
        Grouping::Rows => [1320, 4 * 130, 40],
        Grouping::Contraction => [1100, 130, 1400],
    };
    let mut a = HostMatrix::random([m, k], Format::E4m3, granularity, 5);
    let mut b = HostMatrix::random([n, k], Format::E5m2, granularity, 6);
    if grouping == Grouping::Contraction {
        // From a group's end to the next multiple.
        let between = |c: usize| [70..128, 1200..1280, 1300..1400].iter().any(|span| span.contains(&c));
        for matrix in [&mut a, &mut b] {
            matrix.codes.iter_mut().enumerate().filter(|(i, _)| between(i % k)).for_each(|(_, code)| *code = 0);
        }
    }
    let got = grouped(&client, &a.upload(&client), &b.upload(&client), &groups(&client, &ends, grouping));
    let reference = |a: &HostMatrix, b: &HostMatrix| {
        reference::grouped_scaled_gemm_f64(&a.view(), &b.view(), &ends.map(|end| end as i32), grouping)
    };
    let (want, size) = (reference(&a, &b), reference(&magnitudes(&a), &magnitudes(&b)));
    assert_eq!(got.len(), want.len());
    for (i, (got, (want, size))) in got.iter().zip(want.iter().zip(size)).enumerate() {
        let error = (f64::from(*got) - want).abs();
        assert!(error <= (k + 8) as f64 * 2f64.powi(-24) * size, "element {i}: {got}, not {want}");
    }
}

/// Ends beyond the axis, or below their predecessors, read and write nothing that is not there.
#[test]
fn ends_that_cannot_be() {
    let Some(client) = client() else { return };
    let run = |[a, b]: &[HostMatrix; 2], ends: &[usize], grouping| {
        grouped(&client, &a.upload(&client), &b.upload(&client), &groups(&client, ends, grouping))
    };
    let pair = |shapes: [[usize; 2]; 2], granularity| {
        [0, 1].map(|i| HostMatrix::random(shapes[i], Format::E4m3, granularity, 1 + i as u64))
    };
    let operands = pair([[40, 32], [30, 32]], Granularity::Row);
    let rows = |ends: &[usize]| run(&operands, ends, Grouping::Rows);
    assert_eq!(rows(&[20, 10, 100]), rows(&[20, 20, 40]));
    assert_eq!(rows(&[(1 << 31) - 1, 5, 5]), rows(&[40, 40, 40]));
    assert_eq!(rows(&[1 << 31, 5, u32::MAX as usize]), rows(&[0, 5, 5]));
    for granularity in GRANULARITIES {
        let operands = pair([[20, 300], [35, 300]], granularity);
        let contraction = |ends: &[usize]| run(&operands, ends, Grouping::Contraction);
        assert_eq!(contraction(&[20, 10, 1000]), contraction(&[20, 20, 300]), "{granularity}");
        assert_eq!(contraction(&[200, 10, 300]), contraction(&[200, 200, 300]), "{granularity}");
        assert_eq!(contraction(&[(1 << 31) - 1, 300, 5]), contraction(&[300, 300, 300]), "{granularity}");
        assert_eq!(contraction(&[1 << 31, 300, 5]), contraction(&[0, 300, 300]), "{granularity}");
        // Where an end is below its predecessor's, that group is empty.
        let [m, n] = [20, 35];
        assert!(contraction(&[200, 10, 10])[m * n..2 * m * n].iter().all(|&x| x == 0.0), "{granularity}");
    }
}

#[test]
fn groups_that_do_not_fit() {
    let Some(client) = client() else { return };
    let a = HostMatrix::random([4, 32], Format::E4m3, Granularity::Tensor, 1).upload(&client);
    let b = HostMatrix::random([7, 32], Format::E4m3, Granularity::Tensor, 2).upload(&client);
    let run = |groups: &Groups| grouped_scaled_gemm(&client, &a, &b, groups, F32, GemmConfig::default()).unwrap_err();
    let two = groups(&client, &[2, 4], Grouping::Rows);
    assert_eq!(run(&two), KernelError::UnevenGroups { rows: 7, groups: 2 });
    assert_eq!(run(&Groups { count: 0, ..two.clone() }), KernelError::NoGroups);
    assert_eq!(run(&Groups { count: 7, ..two.clone() }), KernelError::OutOfBounds { needed: 28, available: 8 });
    let c = HostMatrix::random([4, 33], Format::E4m3, Granularity::Tensor, 3).upload(&client);
    let error = grouped_scaled_gemm(&client, &a, &c, &two, F32, GemmConfig::default()).unwrap_err();
    assert_eq!(error, KernelError::ContractionMismatch { a: 32, b: 33 });
}
