//! Interpreted grouped GEMMs, against sums in f64 of each group.

use codegen::device::{GenerateCuda, OfflineDevice, execute_shared, on_each};
use cubecl_core::Runtime;
use cubecl_core::ir::StorageType;
use float8_kernels::{Format, Granularity, Grouping};
use kernel_tests::{Codes, Gemm, GroupSizes};

use super::{BF16, Client, F16, F32, MX, config, is_own};

/// Checks groups of rows, for N by K per group. NaN in one group affects only its rows.
pub(super) fn check_rows(client: &Client, sizes: GroupSizes, rest: [usize; 2], granularities: Pair, out: StorageType) {
    let gemm = Gemm { granularities, codes: Codes::NanCode, out, ..Gemm::grouped(Grouping::Rows, sizes, rest) };
    check(client, Gemm { formats: Format::ALL, ..gemm });
}

/// Checks groups of the contraction, for M by N per group.
pub(super) fn check_contraction(
    client: &Client,
    sizes: GroupSizes,
    rest: [usize; 2],
    granularities: Pair,
    out: StorageType,
) {
    let gemm = Gemm { granularities, out, ..Gemm::grouped(Grouping::Contraction, sizes, rest) };
    check(client, Gemm { formats: [Format::ALL[1], Format::ALL[0]], ..gemm });
}

fn check(client: &Client, gemm: Gemm) {
    if is_own(client, gemm.granularities) {
        // On Hopper and with `mma.sync`, fast accumulation changes only when sums are added.
        super::check(client, Gemm { config: config(gemm.out == F16), ..gemm });
    }
}

pub(super) type Pair = [Granularity; 2];

/// Tiles of one group, of two and of many, empty groups, and rows outside of all groups.
const MIXED: GroupSizes = (&[0, 70, 1, 0, 69], 10);

/// Granularities, with the output dtype of the larger of two shapes.
pub(super) const GROUPED: [(Pair, StorageType); 4] = [
    ([Granularity::Tensor; 2], F32),
    ([Granularity::Row; 2], BF16),
    ([Granularity::Row, Granularity::Tensor], F16),
    ([MX; 2], F32),
];

/// Grouped GEMMs with scales of blocks: the pairs of the recipe `blockwise` for the forward pass
/// and the weight gradient, and others.
pub(super) const GROUPED_BLOCKS: [(Pair, StorageType); 4] = [
    ([Granularity::Block1x128, Granularity::Block128x128], BF16),
    ([Granularity::Block1x128; 2], F32),
    ([Granularity::Block128x128, Granularity::Row], F16),
    ([MX, Granularity::Block128x128], F32),
];

fn each(check: impl Fn(&Client) + Sync) {
    let Some(_running) = execute_shared() else { return };
    // A device of many SMs uses small tiles, one of two SMs large ones in sequence.
    let devices = [(80, 132), (89, 132), (90, 132), (90, 2), (100, 132), (100, 2), (120, 2)];
    on_each(devices, |(sm, sms)| check(&GenerateCuda::client(&OfflineDevice { sm, sms })));
}

#[test]
fn rows_of_groups() {
    each(|client| {
        for (granularities, dtype) in GROUPED {
            check_rows(client, MIXED, [128, 96], granularities, dtype);
            check_rows(client, (&[64, 36], 0), [50, 100], granularities, F32);
        }
    });
}

/// Rows of groups whose scales change along the contraction. Squares of one group's matrix of B and
/// squares shared by two groups; rows of two, four and five scales.
#[test]
fn rows_of_groups_in_blocks() {
    each(|client| {
        for (granularities, dtype) in GROUPED_BLOCKS {
            check_rows(client, MIXED, [128, 256], granularities, dtype);
            check_rows(client, (&[64, 36], 0), [50, 400], granularities, F32);
            check_rows(client, (&[3, 128], 1), [200, 520], granularities, F32);
        }
    });
}

/// 64 groups of up to three rows.
const FEW: [usize; 64] = {
    let mut sizes = [0; 64];
    let mut group = 0;
    while group < sizes.len() {
        sizes[group] = group * 7 % 4;
        group += 1;
    }
    sizes
};

/// 256 groups, most of them empty.
const SPARSE: [usize; 256] = {
    let mut sizes = [0; 256];
    (sizes[3], sizes[4], sizes[90], sizes[200], sizes[254]) = (33, 1, 70, 5, 64);
    sizes
};

/// More groups than a block has tiles: each block continues from its last group, past empty ones.
#[test]
fn many_groups() {
    let Some(_running) = execute_shared() else { return };
    on_each([(90, 3), (100, 3), (80, 2)], |(sm, sms)| {
        let client = GenerateCuda::client(&OfflineDevice { sm, sms });
        check_rows(&client, (&FEW, 5), [72, 32], [Granularity::Row; 2], BF16);
        check_rows(&client, (&SPARSE, 3), [16, 32], [Granularity::Tensor; 2], F32);
        check_contraction(&client, (&FEW, 1), [24, 40], [Granularity::Row; 2], F32);
        check_contraction(&client, (&SPARSE, 0), [8, 16], [Granularity::Tensor; 2], BF16);
    });
}

/// Matrices of B that start anywhere in a tile of scales, and columns that then need one more tile.
#[test]
fn columns_of_groups() {
    let Some(_running) = execute_shared() else { return };
    on_each([132, 2], |sms| {
        let client = GenerateCuda::client(&OfflineDevice { sm: 100, sms });
        for n in [1, 31, 64, 96, 130, 200, 320] {
            check_rows(&client, (&[40, 90, 1], 9), [n, 160], [MX; 2], if n == 130 { BF16 } else { F32 });
        }
    });
}

/// Contractions that start and end anywhere in a step, and empty ones.
#[test]
fn contractions_of_groups() {
    each(|client| {
        for (granularities, dtype) in GROUPED {
            check_contraction(client, (&[0, 128, 1, 150, 0], 0), [130, 40], granularities, dtype);
            check_contraction(client, (&[33, 64], 7), [40, 129], granularities, F32);
        }
    });
}

/// Contractions of groups whose scales change along them: groups start at any block of a load.
#[test]
fn contractions_of_groups_in_blocks() {
    each(|client| {
        for (granularities, dtype) in GROUPED_BLOCKS {
            check_contraction(client, (&[0, 128, 1, 150, 0], 0), [130, 40], granularities, dtype);
            check_contraction(client, (&[33, 64], 7), [40, 129], granularities, F32);
            check_contraction(client, (&[130, 200, 20], 7), [70, 200], granularities, F32);
        }
    });
}
