//! Interpreted grouped GEMMs whose tiles are made by clusters, against sums in f64 of each group.
//! On Hopper two blocks share the tiles of B by multicast; on Blackwell pairs multiply together
//! (`.cta_group::2`).
//!
//! On these numbers of SMs plans use clusters for these shapes, as
//! `tests/kernels/tests/reference/plan.rs` checks.
//! Each launch is checked here too.

use codegen::device::{Execution, GenerateCuda, OfflineDevice, execute, on_each};
use cubecl_core::Runtime;
use cubecl_core::ir::StorageType;
use float8_kernels::Granularity;
use kernel_tests::GroupSizes;

use super::grouped::{GROUPED, GROUPED_BLOCKS, Pair, check_contraction, check_rows};
use super::{Client, F32};

/// Sizes of groups, the two dimensions that the groups do not divide, and SMs.
type Case = (GroupSizes, [usize; 2], u16);

const CONTRACTIONS: [Case; 2] =
    // Empty groups, groups of less than a step and of more; a second block with two rows.
    [((&[0, 128, 1, 150, 0], 0), [130, 258], 4), ((&[33, 300, 64], 7), [200, 130], 2)];

/// Runs `check` for all shapes and granularities. Every launch must be of a kernel whose CUDA
/// contains `text`.
fn in_clusters<const N: usize>(
    [sm, seed]: [u16; 2],
    text: &str,
    cases: [Case; N],
    pairs: &[(Pair, StorageType)],
    check: impl Fn(&Client, GroupSizes, [usize; 2], Pair, StorageType) + Sync,
) {
    let Some(running) = execute(Execution { seed: u64::from(seed) }) else { return };
    for &(granularities, dtype) in pairs {
        let before = running.launches_of(text);
        on_each(cases, |(sizes, rest, sms)| {
            check(&GenerateCuda::client(&OfflineDevice { sm, sms }), sizes, rest, granularities, dtype);
        });
        assert_eq!(running.launches_of(text), before + N, "{granularities:?} on sm_{sm}: launches with {text}");
    }
}

fn rows<const N: usize>(of: [u16; 2], text: &str, cases: [Case; N], pairs: &[(Pair, StorageType)]) {
    in_clusters(of, text, cases, pairs, check_rows);
}

fn contractions(of: [u16; 2], text: &str, pairs: &[(Pair, StorageType)]) {
    in_clusters(of, text, CONTRACTIONS, pairs, check_contraction);
}

const MULTICAST: &str = "complete_tx::bytes.multicast::cluster";
const PAIR: &str = "tcgen05.mma.cta_group::2.kind";

/// Cases:
///
/// - empty groups, and groups of one row and of less than a tile
/// - ends inside tiles, with rows for one and for both blocks of a cluster
/// - one group, and rows outside of all groups
/// - matrices of B that start inside and outside of squares of scales
const HOPPER: [Case; 5] = [
    ((&[0, 100, 1, 799], 140), [66, 160], 2),
    ((&[300, 130], 90), [200, 300], 6),
    ((&[200, 270], 50), [256, 160], 6),
    ((&[250], 10), [200, 160], 2),
    ((&[0, 70, 1, 329], 120), [130, 160], 132),
];

#[test]
fn rows_on_hopper() {
    rows([90, 0], MULTICAST, HOPPER, &GROUPED);
    rows([90, 3], MULTICAST, [HOPPER[1]], &GROUPED);
}

#[test]
fn rows_on_hopper_in_blocks() {
    rows([90, 0], MULTICAST, HOPPER, &GROUPED_BLOCKS[..2]);
}

/// Clusters where a pair multiplies. With 1×32 the columns of a tile start at each position of a
/// tile of scales.
const BLACKWELL: [Case; 4] = [
    ((&[0, 100, 1, 299], 120), [130, 300], 2),
    ((&[140, 115], 5), [66, 1000], 2),
    ((&[0, 129, 171, 200], 20), [200, 300], 8),
    ((&[240], 10), [66, 160], 2),
];

#[test]
fn rows_on_blackwell() {
    rows([100, 0], PAIR, BLACKWELL, &GROUPED);
    rows([100, 3], PAIR, [BLACKWELL[0], BLACKWELL[1]], &GROUPED);
}

#[test]
fn contractions_of_both() {
    contractions([90, 0], MULTICAST, &GROUPED);
    contractions([90, 0], MULTICAST, &GROUPED_BLOCKS[..2]);
    contractions([100, 0], PAIR, &GROUPED);
}

/// If groups have at most the rows of one block, the second block of a cluster would have none, so
/// clusters are not used.
#[test]
fn small_groups_take_none() {
    let Some(running) = execute(Execution::default()) else { return };
    let cases: [(u16, GroupSizes, &str); 2] = [(90, (&[10, 90, 92], 0), MULTICAST), (100, (&[10, 90, 284], 0), PAIR)];
    for (sm, sizes, text) in cases {
        let client = GenerateCuda::client(&OfflineDevice { sm, sms: 2 });
        check_rows(&client, sizes, [130, 160], [Granularity::Tensor; 2], F32);
        assert_eq!(running.launches_of(text), 0, "sm_{sm}");
    }
}
