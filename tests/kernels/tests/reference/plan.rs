//! Plans of TMA GEMMs on an H200, a B200, and the small machines of the interpreted GEMMs
//! (`tests/cuda/codegen`).

use float8_kernels::{GemmPath, GemmPlan, GemmShape, GemmTile, Granularity, Grouping, gemm_plan};

const H200: usize = 132;
const B200: usize = 148;

/// Contraction length of a stage.
const STEP: usize = 128;

/// Rows of a Blackwell tile.
const ROWS: usize = 128;

const TENSOR: [Granularity; 2] = [Granularity::Tensor; 2];
const MX: [Granularity; 2] = [Granularity::Block1x32; 2];
/// One scale of B per 128 columns, and one per column.
const BLOCKS: [Granularity; 2] = [Granularity::Block1x128, Granularity::Block128x128];
const COLUMNS: [Granularity; 2] = [Granularity::Block1x128; 2];

fn dense(product: [usize; 3], granularities: [Granularity; 2]) -> GemmShape {
    GemmShape { product, granularities, power_of_two: false, use_fast_accum: false, groups: None }
}

/// Hopper shapes: sums that stay in the tensor cores, that are added each step, and that are scaled
/// each step.
fn on_hopper(product: [usize; 3]) -> [GemmShape; 4] {
    let fast = GemmShape { use_fast_accum: true, ..dense(product, TENSOR) };
    [fast, dense(product, TENSOR), dense(product, BLOCKS), dense(product, COLUMNS)]
}

/// Blackwell shapes: scales applied by the epilogue, by the tensor cores, and each step.
fn on_blackwell(product: [usize; 3]) -> [GemmShape; 4] {
    [TENSOR, MX, BLOCKS, COLUMNS].map(|granularities| dense(product, granularities))
}

fn hopper(shape: &GemmShape, sms: usize) -> GemmPlan {
    gemm_plan(GemmPath::Wgmma, shape, sms).expect("TMA feeds it")
}

fn blackwell(shape: &GemmShape, sms: usize) -> GemmPlan {
    gemm_plan(GemmPath::Tcgen05, shape, sms).expect("TMA feeds it")
}

/// Plan on an H200 for sums that are added each step.
fn hopper_of(product: [usize; 3]) -> GemmPlan {
    hopper(&dense(product, TENSOR), H200)
}

const fn plan([rows, cols]: [usize; 2], cluster: usize) -> GemmPlan {
    GemmPlan { tile: GemmTile { rows, cols }, cluster, splits: 1 }
}

const LARGE: [[usize; 3]; 4] = [[4096; 3], [8192; 3], [16384; 3], [8192, 14336, 4096]];

/// Eight experts of Mixtral.
const GROUPED: [(Grouping, [usize; 3]); 3] = [
    (Grouping::Rows, [16384, 14336, 4096]),
    (Grouping::Rows, [16384, 4096, 14336]),
    (Grouping::Contraction, [14336, 4096, 16384]),
];

#[test]
fn other_paths_have_none() {
    for path in [GemmPath::Mma, GemmPath::F16Mma, GemmPath::Gemv, GemmPath::Emulated, GemmPath::Host] {
        assert_eq!(gemm_plan(path, &dense([4096; 3], TENSOR), H200), None);
    }
}

/// The largest tile in clusters on Hopper, the widest in pairs on Blackwell; groups of few rows in
/// neither.
#[test]
fn large_gemms_take_large_tiles() {
    let grouped = GROUPED.map(|(grouping, product)| (Some((grouping, 8)), product));
    for (groups, product) in LARGE.map(|product| (None, product)).into_iter().chain(grouped) {
        let shape = GemmShape { groups, ..dense(product, TENSOR) };
        assert_eq!(hopper(&shape, H200), plan([128, 256], 2), "{shape:?}");
        for (shape, (cols, cluster)) in on_blackwell(product).into_iter().zip([(256, 2), (192, 2), (128, 1), (128, 1)])
        {
            let shape = GemmShape { groups, ..shape };
            assert_eq!(blackwell(&shape, B200), plan([ROWS, cols], cluster), "{shape:?}");
        }
    }
    let of_rows = |shape| GemmShape { groups: Some((Grouping::Rows, 8)), ..shape };
    assert_eq!(hopper(&of_rows(dense([512, 4096, 4096], TENSOR)), H200).cluster, 1, "64 rows a group");
    for shape in on_blackwell([8 * ROWS, 14336, 4096]) {
        assert_eq!(blackwell(&of_rows(shape), B200).cluster, 1, "{ROWS} rows a group");
    }
}

/// The tensor cores apply these scales, like MX.
#[test]
fn powers_of_two_are_planned_as_mx() {
    for product in LARGE {
        let [_, mx, blocks, columns] = on_blackwell(product);
        for shape in [blocks, columns].map(|shape| GemmShape { power_of_two: true, ..shape }) {
            assert_eq!(blackwell(&shape, B200), blackwell(&mx, B200), "{shape:?}");
        }
    }
}

#[test]
fn few_rows_take_low_tiles_and_few_columns_narrow_ones() {
    let few = hopper_of([16, 4096, 4096]);
    assert_eq!((few.tile.rows, few.cluster), (64, 1), "{few:?}");
    for shape in [1, 64, 128].into_iter().flat_map(|m| on_blackwell([m, 65536, 4096])) {
        assert_eq!(blackwell(&shape, B200).cluster, 1, "{shape:?}");
    }
    assert_eq!(hopper_of([16384, 48, 1024]).tile, GemmTile { rows: 128, cols: 64 });
    for shape in on_blackwell([16384, 48, 1024]) {
        assert_eq!(blackwell(&shape, B200).tile.cols, 64, "{shape:?}");
    }
}

#[test]
fn small_outputs_of_long_contractions_are_split() {
    let plans = |k| {
        let product = [256, 256, k];
        on_blackwell(product).map(|shape| blackwell(&shape, B200)).into_iter().chain([hopper_of(product)])
    };
    assert!(plans(65536).all(|plan| plan.splits >= 8));
    assert!(plans(256).all(|plan| plan.splits == 1));
}

/// With an odd number of tiles along M, one block of the last pair has no rows.
#[test]
fn odd_numbers_of_tiles_take_pairs_where_that_is_faster() {
    let of = |product| blackwell(&dense(product, TENSOR), B200);
    let pairs = plan([ROWS, 256], 2);
    // 147 tiles are one round on 148 SMs. So are their 74 pairs, which take fewer cycles per step.
    assert_eq!(pairs.items(147 * ROWS, 256), B200 / 2);
    assert_eq!(of([147 * ROWS, 256, 4096]), pairs);
    // 3 by 49 tiles are one round too, but their 98 pairs are two.
    assert_eq!(pairs.items(3 * ROWS, 49 * 256), 98);
    assert_eq!(of([3 * ROWS, 49 * 256, 4096]), GemmPlan { cluster: 1, ..pairs });
}

/// Shapes of the interpreted grouped GEMMs in clusters and the number of SMs, with the expected
/// tiles by destination of the sums.
#[test]
fn groups_take_clusters_on_small_machines() {
    for (grouping, count, product, sms, tiles) in [
        (Grouping::Rows, 4, [1040, 66, 160], 2, [[128, 128]; 4]),
        (Grouping::Rows, 2, [520, 200, 300], 6, [[128, 256], [64, 256], [64, 256], [64, 256]]),
        (Grouping::Rows, 2, [520, 256, 160], 6, [[128, 256], [64, 256], [64, 256], [64, 256]]),
        (Grouping::Rows, 1, [260, 200, 160], 2, [[64, 256]; 4]),
        (Grouping::Rows, 4, [520, 130, 160], 132, [[64, 128]; 4]),
        (Grouping::Contraction, 5, [130, 258, 512], 4, [[128, 256]; 4]),
        (Grouping::Contraction, 3, [200, 130, 583], 2, [[128, 256]; 4]),
    ] {
        for (shape, tile) in on_hopper(product).into_iter().zip(tiles) {
            let shape = GemmShape { groups: Some((grouping, count)), ..shape };
            assert_eq!(hopper(&shape, sms), plan(tile, 2), "{shape:?}");
        }
    }
}

/// Shapes of the interpreted GEMMs of pairs and the number of SMs, with the expected columns and
/// splits, per-tensor and with 1x32 scales.
#[test]
fn small_machines_take_pairs_too() {
    let (rows, contraction) = (|count| Some((Grouping::Rows, count)), |count| Some((Grouping::Contraction, count)));
    for (groups, product, sms, cols, splits) in [
        (None, [260, 260, 1000], 2, [256, 192], 1),
        (None, [390, 516, 140], 4, [256, 192], 1),
        (None, [129, 201, 31], 4, [128, 128], 1),
        (None, [130, 67, 4100], 8, [128, 128], 4),
        (rows(4), [520, 130, 300], 2, [256, 192], 1),
        (rows(2), [260, 66, 1000], 2, [128, 128], 1),
        (rows(4), [520, 200, 300], 8, [256, 128], 1),
        (rows(1), [250, 66, 160], 2, [128, 128], 1),
        (contraction(5), [130, 258, 512], 4, [256, 192], 1),
        (contraction(3), [200, 130, 583], 2, [256, 192], 1),
    ] {
        for (granularities, cols) in [TENSOR, MX].into_iter().zip(cols) {
            let shape = GemmShape { groups, ..dense(product, granularities) };
            assert_eq!(blackwell(&shape, sms), GemmPlan { splits, ..plan([ROWS, cols], 2) }, "{shape:?}");
        }
    }
    // Pairs by columns and by splits.
    let (pairs, split) = (plan([ROWS, 256], 2), GemmPlan { splits: 4, ..plan([ROWS, 128], 2) });
    assert_eq!([pairs.items(260, 260), pairs.items(390, 516), split.items(130, 67)], [4, 6, 4]);
}

#[test]
fn every_item_has_work() {
    let sides = |n| [1, 63, 64, 65, 128, 129, 1000, 4096].map(|m| [m, n]);
    for [m, n] in [1, 64, 100, 257, 5000].into_iter().flat_map(sides) {
        for k in [1, 128, 500, 4096, 100_000] {
            let product = [m, n, k];
            let plans = on_blackwell(product).map(|shape| blackwell(&shape, B200));
            for plan in on_hopper(product).map(|shape| hopper(&shape, H200)).into_iter().chain(plans) {
                assert!(plan.splits <= k.div_ceil(STEP), "{plan:?}");
                let padding = plan.padded_rows(m) - m;
                assert!(padding < plan.tile.rows * plan.cluster, "{plan:?}");
                assert!(plan.cluster == 1 || m > plan.tile.rows, "{plan:?}");
            }
        }
    }
}

/// Ends beyond the axis, or below the previous end or zero, are clamped. Along the contraction,
/// groups begin at multiples of 128.
#[test]
fn groups_have_these_rows() {
    for (grouping, len, ends, spans) in [
        (Grouping::Rows, 12, vec![3, 7, 7, 10], vec![0..3, 3..7, 7..7, 7..10]),
        (Grouping::Rows, 12, vec![4, 2, 100], vec![0..4, 4..4, 4..12]),
        (Grouping::Rows, 12, vec![i32::MIN, 5, -1], vec![0..0, 0..5, 5..5]),
        (Grouping::Contraction, 300, vec![20, 10, 1000], vec![0..20, 128..128, 128..300]),
        (Grouping::Contraction, 300, vec![-7, 130, 280], vec![0..0, 0..130, 256..280]),
    ] {
        assert_eq!(grouping.spans(&ends, len), spans, "{grouping:?} {ends:?}");
    }
}
