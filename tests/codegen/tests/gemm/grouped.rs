//! Grouped GEMMs, interpreted, against sums in f64 of each group.

use codegen::device::{Execution, GenerateCuda, OfflineDevice, execute, on_each};
use cubecl_core::Runtime;
use cubecl_core::ir::StorageType;
use float8_kernels::{Format, GROUP_ALIGN, GemmConfig, Granularity, Grouping, Groups, grouped_scaled_gemm};

use super::{BF16, Client, F16, F32, MX, Matrix, Random, from_bytes, half_step, same};

/// Sums of the part `k0..k1` of the contraction of row `i` of `a` and row `j` of `b`, and of their magnitudes.
fn sums(a: &[f64], b: &[f64], [i, j]: [usize; 2], k: usize, [k0, k1]: [usize; 2]) -> (f64, f64) {
    let pairs = a[i * k + k0..i * k + k1].iter().zip(&b[j * k + k0..j * k + k1]);
    pairs.fold((0.0, 0.0), |(sum, size), (x, y)| (sum + x * y, size + (x * y).abs()))
}

fn assert_near(got: f64, (want, size): (f64, f64), half_step: f64, what: impl Fn() -> String) {
    let bound = half_step * want.abs() + 2f64.powi(-20) * size + 2f64.powi(-25);
    let near = if want.is_finite() { (got - want).abs() <= bound } else { same(got, want) };
    assert!(near, "{}: {got}, not {want}, bound {bound:e}", what());
}

fn run(client: &Client, a: &Matrix, b: &Matrix, ends: &[usize], grouping: Grouping, dtype: StorageType) -> Vec<f32> {
    let bytes: Vec<u8> = ends.iter().flat_map(|&end| (end as u32).to_le_bytes()).collect();
    let groups = Groups { ends: client.create_from_slice(&bytes), count: ends.len(), grouping };
    let (a, b) = (a.upload(client), b.upload(client));
    // Which changes nothing but when sums are added, on Hopper and with `mma.sync`.
    let config = GemmConfig { use_fast_accum: dtype == F16, emulate: false };
    let out = grouped_scaled_gemm(client, &a, &b, &groups, dtype, config).unwrap();
    from_bytes(&client.read_one(out).unwrap_or_else(|error| panic!("{error:?}")), dtype)
}

fn check_rows(client: &Client, ends: &[usize], [m, n, k]: [usize; 3], granularities: Pair, dtype: StorageType) {
    let mut random = Random(31);
    let a = Matrix::random([m, k], Format::E4m3, granularities[0], &mut random);
    let mut b = Matrix::random([ends.len() * n, k], Format::E5m2, granularities[1], &mut random);
    // A NaN is for the rows of its group alone.
    b.codes[(ends.len() - 1) * n * k + 3] = 0x7f;
    let got = run(client, &a, &b, ends, Grouping::Rows, dtype);
    assert_eq!(got.len(), m * n);
    let (left, right) = (a.values(), b.values());
    for i in 0..m {
        let group = ends.iter().position(|&end| i < end);
        for j in 0..n {
            let want = group.map_or((0.0, 0.0), |g| sums(&left, &right, [i, g * n + j], k, [0, k]));
            let what = || format!("{granularities:?} {ends:?} [{m}, {n}, {k}], group {group:?}, [{i}, {j}]");
            assert_near(f64::from(got[i * n + j]), want, half_step(dtype), what);
        }
    }
}

fn check_contraction(client: &Client, sizes: &[usize], [m, n]: [usize; 2], granularities: Pair, dtype: StorageType) {
    let (mut spans, mut at) = (vec![], 0);
    for size in sizes {
        spans.push([at, at + size]);
        at = (at + size).next_multiple_of(GROUP_ALIGN);
    }
    // Some left over, or an empty group that begins where all ends.
    let k = if sizes.last() == Some(&0) { at } else { at + 7 };
    let mut random = Random(37);
    let [a, b] = [(m, Format::E5m2, granularities[0]), (n, Format::E4m3, granularities[1])];
    let [a, b] = [a, b].map(|(rows, format, granularity)| {
        let mut matrix = Matrix::random([rows, k], format, granularity, &mut random);
        let inside = |c: usize| spans.iter().any(|[start, end]| (*start..*end).contains(&c));
        matrix.codes.iter_mut().enumerate().filter(|(i, _)| !inside(i % k)).for_each(|(_, code)| *code = 0);
        matrix
    });
    let ends: Vec<usize> = spans.iter().map(|[_, end]| *end).collect();
    let got = run(client, &a, &b, &ends, Grouping::Contraction, dtype);
    assert_eq!(got.len(), sizes.len() * m * n);
    let (left, right) = (a.values(), b.values());
    for (g, span) in spans.iter().enumerate() {
        for i in 0..m {
            for j in 0..n {
                let want = sums(&left, &right, [i, j], k, *span);
                let what = || format!("{granularities:?} {sizes:?} [{m}, {n}], group {g}, [{i}, {j}]");
                assert_near(f64::from(got[(g * m + i) * n + j]), want, half_step(dtype), what);
            }
        }
    }
}

type Pair = [Granularity; 2];

/// With what the larger of two outputs is made of.
const GROUPED: [(Pair, StorageType); 4] = [
    ([Granularity::Tensor; 2], F32),
    ([Granularity::Row; 2], BF16),
    ([Granularity::Row, Granularity::Tensor], F16),
    ([MX; 2], F32),
];

/// The same with scales of blocks: those of the recipe `blockwise`, for the forward pass and for the weight gradient, and others.
const GROUPED_BLOCKS: [(Pair, StorageType); 4] = [
    ([Granularity::Block1x128, Granularity::Block128x128], BF16),
    ([Granularity::Block1x128; 2], F32),
    ([Granularity::Block128x128, Granularity::Row], F16),
    ([MX, Granularity::Block128x128], F32),
];

fn each(check: impl Fn(&Client) + Sync) {
    let Some(_running) = execute(Execution::default()) else { return };
    // A device of many SMs takes small tiles, one of two large ones, one after the other in a block.
    let devices = [(80, 132), (89, 132), (90, 132), (90, 2), (100, 132), (100, 2), (120, 2)];
    on_each(devices, |(sm, sms)| check(&GenerateCuda::client(&OfflineDevice { sm, sms })));
}

/// Tiles of one group, of two and of many, empty groups, and rows that no group has.
#[test]
fn rows_of_groups() {
    each(|client| {
        for (granularities, dtype) in GROUPED {
            check_rows(client, &[0, 70, 71, 71, 140], [150, 128, 96], granularities, dtype);
            check_rows(client, &[64, 100], [100, 50, 100], granularities, F32);
        }
    });
}

/// The same where scales change along the contraction: squares of one group's matrix of B, and such as two groups share; rows of
/// two, of four and of five scales.
#[test]
fn rows_of_groups_in_blocks() {
    each(|client| {
        for (granularities, dtype) in GROUPED_BLOCKS {
            check_rows(client, &[0, 70, 71, 71, 140], [150, 128, 256], granularities, dtype);
            check_rows(client, &[64, 100], [100, 50, 400], granularities, F32);
            check_rows(client, &[3, 131], [132, 200, 520], granularities, F32);
        }
    });
}

/// Matrices of B that begin anywhere in a tile of scales, and columns that need one tile more for that.
#[test]
fn columns_of_groups() {
    for sms in [132, 2] {
        let Some(_running) = execute(Execution::default()) else { return };
        let client = GenerateCuda::client(&OfflineDevice { sm: 100, sms });
        for n in [1, 31, 64, 96, 130, 200, 320] {
            check_rows(&client, &[40, 130, 131], [140, n, 160], [MX; 2], if n == 130 { BF16 } else { F32 });
        }
    }
}

/// Contractions that begin and end anywhere in a step, and empty ones.
#[test]
fn contractions_of_groups() {
    each(|client| {
        for (granularities, dtype) in GROUPED {
            check_contraction(client, &[0, 128, 1, 150, 0], [130, 40], granularities, dtype);
            check_contraction(client, &[33, 64], [40, 129], granularities, F32);
        }
    });
}

/// The same where scales change along the contraction: groups that begin at any block of those that one load brings.
#[test]
fn contractions_of_groups_in_blocks() {
    each(|client| {
        for (granularities, dtype) in GROUPED_BLOCKS {
            check_contraction(client, &[0, 128, 1, 150, 0], [130, 40], granularities, dtype);
            check_contraction(client, &[33, 64], [40, 129], granularities, F32);
            check_contraction(client, &[130, 200, 20], [70, 200], granularities, F32);
        }
    });
}
