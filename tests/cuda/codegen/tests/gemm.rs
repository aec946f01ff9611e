//! Interpreted GEMMs with `tcgen05`, `wgmma`, `mma.sync`, f16 matrix units and without matrix
//! units, against sums in f64. Covers every pair of formats and of granularities, every class of
//! tile, ragged edges, biases, outputs, accumulation, NaN and infinities.
//!
//! The interpreter's accumulators are f32, so errors are bounded like errors of f32 sums
//! ([`BOUND`]), tighter than on a GPU.

#[path = "gemm/blackwell.rs"]
mod blackwell;
#[path = "gemm/clusters.rs"]
mod clusters;
#[path = "gemm/fixed.rs"]
mod fixed;
#[path = "gemm/grouped.rs"]
mod grouped;
#[path = "gemm/halves.rs"]
mod halves;
#[path = "gemm/stuck.rs"]
mod stuck;
#[path = "gemm/truncated.rs"]
mod truncated;

use codegen::device::{Execution, GenerateCuda, OfflineDevice, execute, execute_shared, on_each};
use codegen::variants::{all_are_asked_for, sample};
use cubecl_core::Runtime;
use cubecl_runtime::client::ComputeClient;
use float8_kernels::{
    CudaArch, Format, GEMV_ROWS, GemmConfig, GemmDevice, GemmPath, Granularity, InvScale, cuda_arch, gemm_path,
};
use kernel_tests::{BF16, Codes, DTYPES, EMULATE, F16, F32, FAST, Gemm, HostMatrix, MX, Memory, PRECISE};

type Client = ComputeClient<GenerateCuda>;

/// Roundings of f32 sums of blocks and of the whole, as a share of `Σ |terms|`.
const BOUND: f64 = 1.0 / (1 << 20) as f64;

/// Compute capabilities with their GEMM paths: without E8M0 scales, and with E8M0 scales only.
const PATHS: [(u16, [GemmPath; 2]); 5] = [
    (80, [GemmPath::F16Mma; 2]),
    (89, [GemmPath::Mma; 2]),
    (90, [GemmPath::Wgmma, GemmPath::Bf16Wgmma]),
    (100, [GemmPath::Tcgen05; 2]),
    (120, [GemmPath::Mma; 2]),
];

fn client(sm: u16) -> Client {
    GenerateCuda::client(&OfflineDevice::new(sm))
}

const fn config(use_fast_accum: bool) -> GemmConfig {
    if use_fast_accum { FAST } else { PRECISE }
}

/// Runs the GEMM and compares every element.
fn check(client: &Client, gemm: Gemm) {
    let [a, b] = gemm.matrices();
    check_operands(client, gemm, [&a, &b]);
}

/// Checks a GEMM with these operands.
fn check_operands(client: &Client, gemm: Gemm, operands: [&HostMatrix; 2]) {
    gemm.compare(client, operands, Some(BOUND)).unwrap_or_else(|failure| panic!("{gemm:?}: {failure}"));
}

/// Checks on a device of many SMs, where each makes a small tile, and on a device of two. The
/// latter makes large tiles, in sequence or as a cluster.
fn each(check: impl Fn([&Client; 2]) + Sync) {
    let Some(_running) = execute_shared() else { return };
    on_each([80, 89, 90, 100, 120], |sm| {
        check([&client(sm), &GenerateCuda::client(&OfflineDevice { sm, sms: 2 })]);
    });
}

/// Whether case `i` runs: half of the cases run on architectures other than Hopper and Blackwell,
/// unless `FLOAT8_VARIANTS` requests all. Most of a case's time is NVRTC's, for kernels that no
/// other case uses.
fn is_sampled(client: &Client, i: usize) -> bool {
    let is_main = matches!(cuda_arch(client), Some(CudaArch::Sm90 | CudaArch::Sm100));
    is_main || i.is_multiple_of(2) || all_are_asked_for()
}

/// Whether a kernel for these scales is one that no other architecture interprets: matrices decoded to
/// f16 have the same CUDA from sm_89 on, and are left to sm_90.
fn is_own(client: &Client, granularities: [Granularity; 2]) -> bool {
    gemm_path(client, granularities, PRECISE) != GemmPath::F16Mma
        || matches!(cuda_arch(client), Some(CudaArch::Sm80 | CudaArch::Sm90))
        || all_are_asked_for()
}

#[test]
fn paths() {
    for (sm, [plain, scaled]) in PATHS {
        for (granularities, path) in [
            ([Granularity::Row, Granularity::Tensor], plain),
            ([Granularity::Block1x128, Granularity::Block128x128], plain),
            ([MX; 2], scaled),
            ([MX, Granularity::Tensor], GemmPath::F16Mma),
            ([Granularity::Block128x128, MX], GemmPath::F16Mma),
            ([Granularity::Row, Granularity::Block128x128], GemmPath::F16Mma),
        ] {
            let emulate = GemmConfig { emulate: true, ..GemmConfig::default() };
            assert_eq!(gemm_path(&client(sm), granularities, GemmConfig::default()), path, "sm_{sm}");
            assert_eq!(gemm_path(&client(sm), granularities, emulate), GemmPath::Emulated, "sm_{sm}");
        }
    }
}

/// Rows, columns and contraction on both sides of the edges of chunks, products, steps, tiles and
/// blocks.
#[test]
fn formats_and_ragged_shapes() {
    const SIDES: [usize; 10] = [1, 7, 16, 31, 64, 65, 128, 129, 200, 300];
    each(|[_, client]| {
        for (i, m) in SIDES.into_iter().enumerate() {
            // Each M with every other N; K varies along.
            for j in (i % 2..SIDES.len()).step_by(2).filter(|j| is_sampled(client, (i + j) / 2)) {
                let (n, k) = (SIDES[(i + j) % SIDES.len()], SIDES[(3 * i + j) % SIDES.len()]);
                check(client, Gemm { formats: [Format::ALL[j % 2], Format::ALL[j / 2 % 2]], ..Gemm::new([m, n, k]) });
            }
        }
    });
}

#[test]
fn granularities() {
    each(|[_, client]| {
        for (i, left) in Granularity::ALL.into_iter().enumerate() {
            let sampled =
                |(j, right): &(usize, Granularity)| is_sampled(client, i + j) && is_own(client, [left, *right]);
            for (j, right) in Granularity::ALL.into_iter().enumerate().filter(sampled) {
                for shape in [[200, 253, 300], [130, 258, 140]] {
                    let gemm = Gemm {
                        formats: [Format::ALL[i % 2], Format::ALL[j % 2]],
                        granularities: [left, right],
                        bias: (j % 2 == 1).then_some((DTYPES[i % 3], 1 + i % 2)),
                        out: [F32, BF16, F16][(i + j) % 3],
                        memory: Memory::Given,
                        config: config(j / 2 % 2 == 1),
                        ..Gemm::new(shape)
                    };
                    check(client, gemm);
                }
            }
        }
    });
}

/// Outputs whose tiles are processed in several groups, and tiles of each class with rows at even
/// elements.
#[test]
fn many_tiles() {
    const BLOCKS: [Granularity; 2] = [Granularity::Block1x128, Granularity::Block128x128];
    each(|[many, one]| {
        for (shape, granularities, client) in [
            ([600, 202, 40], [Granularity::Row; 2], many),
            ([1400, 130, 20], [Granularity::Row; 2], one),
            ([200, 254, 300], BLOCKS, one),
            ([200, 254, 300], [Granularity::Tensor; 2], one),
            ([130, 258, 300], BLOCKS, one),
            ([600, 202, 40], [MX; 2], many),
            ([200, 254, 300], [MX; 2], one),
            ([130, 258, 300], [MX, Granularity::Block1x128], one),
        ]
        .into_iter()
        .filter(|(_, granularities, client)| is_own(client, *granularities))
        {
            for config in [PRECISE, FAST] {
                check(client, Gemm { granularities, out: BF16, config, ..Gemm::new(shape) });
            }
        }
    });
}

/// Hopper's tiles, low, narrow and large, with and without clusters, in sequence in a block;
/// split-K.
#[test]
fn hopper_plans() {
    let Some(_running) = execute(Execution { seed: 5 }) else { return };
    let [many, few] = [132, 2];
    let shapes = [
        // 128 x 256, in clusters: four items of one cluster, the last row of tiles ragged.
        ([500, 504, 260], few),
        // 128 x 256 without clusters.
        ([260, 510, 260], few),
        // 64 x 256, and 64 x 128.
        ([60, 500, 260], few),
        ([40, 250, 900], few),
        // 128 x 64 in clusters, two bands of rows.
        ([2200, 8, 130], few),
        // Split into ragged numbers of steps, without and with clusters; rows that TMA can and
        // cannot write.
        ([60, 72, 2700], many),
        ([200, 67, 4100], many),
    ];
    on_each([many, few], |sms| {
        let client = &GenerateCuda::client(&OfflineDevice { sm: 90, sms });
        for (i, (shape, _)) in shapes.into_iter().enumerate().filter(|(_, (_, of))| *of == sms) {
            for (j, granularities) in [
                [Granularity::Tensor; 2],
                [Granularity::Block1x128, Granularity::Block128x128],
                [Granularity::Block1x128; 2],
                [MX; 2],
            ]
            .into_iter()
            .enumerate()
            {
                // Each tile and each pair has both; every tile of every pair would need twice the kernels.
                for fast in
                    [false, true].into_iter().filter(|fast| (i + j) % 2 == *fast as usize || all_are_asked_for())
                {
                    let (config, memory) = (config(fast), Memory::Given);
                    let gemm =
                        Gemm { granularities, bias: Some((F32, 1)), out: BF16, memory, config, ..Gemm::new(shape) };
                    check(client, Gemm { formats: Format::ALL, ..gemm });
                }
            }
        }
    });
}

/// Contractions on both sides of the edges of blocks of 32, of words of four and of the padding of
/// a row.
#[test]
fn e8m0_ragged_contractions() {
    each(|[_, client]| {
        for (i, k) in [1, 16, 17, 31, 32, 33, 63, 96, 127, 128, 129, 159, 160, 257].into_iter().enumerate() {
            let (m, n, other) = (33 + i, 70 - i, [MX, Granularity::Row][i / 4 % 2]);
            let formats = [Format::ALL[i % 2], Format::ALL[i / 2 % 2]];
            let gemm = Gemm { formats, granularities: [MX, other], ..Gemm::new([m, n, k]) };
            check(client, Gemm { config: config(i % 3 == 0), ..gemm });
            if is_own(client, [other, MX]) {
                check(client, Gemm { granularities: [other, MX], ..gemm });
            }
        }
    });
}

/// Very different scales whose products are similar, and the smallest and largest scales, of zeros.
#[test]
fn e8m0_far_scales() {
    each(|[_, client]| {
        for format in Format::ALL {
            let gemm = Gemm { formats: [format; 2], granularities: [MX; 2], ..Gemm::new([130, 70, 270]) };
            let [mut a, mut b] = gemm.matrices();
            let k = gemm.shape[2];
            for (matrix, sign) in [(&mut a, 1), (&mut b, -1)] {
                for (i, scale) in matrix.inv_scales.iter_mut().enumerate() {
                    *scale = InvScale::new(2f32.powi(sign * [90, -90, 40, 0, -127, 127][i % k.div_ceil(32) % 6]));
                }
                for (i, code) in matrix.codes.iter_mut().enumerate() {
                    if i % k / 32 % 6 > 3 {
                        *code = 0;
                    }
                }
            }
            check_operands(client, gemm, [&a, &b]);
        }
    });
}

/// Every code decodes to its value, including NaN and infinity.
#[test]
fn every_code() {
    each(|[client, _]| {
        for (format, granularity) in Format::ALL.into_iter().flat_map(|f| [Granularity::Tensor, MX].map(|g| (f, g))) {
            for (codes, shape) in [(Codes::EachLeft, [256, 70, 40]), (Codes::EachRight, [70, 256, 40])] {
                check(
                    client,
                    Gemm { codes, formats: [format; 2], granularities: [granularity; 2], ..Gemm::new(shape) },
                );
            }
        }
    });
}

/// NaN codes and NaN scales reach only the outputs of their rows and columns; infinities behave as
/// in f64.
#[test]
fn not_finite() {
    each(|[_, client]| {
        for granularity in Granularity::ALL {
            let gemm = Gemm { formats: Format::ALL, granularities: [granularity; 2], ..Gemm::new([140, 134, 300]) };
            let ([mut a, mut b], k) = (gemm.matrices(), gemm.shape[2]);
            a.codes[7 * k + 49] = 0xff;
            a.codes[139 * k + 299] = 0x7f;
            b.codes[k + 3] = 0x7c;
            b.codes[133 * k + 2] = 0xfd;
            check_operands(client, gemm, [&a, &b]);
            let granularities = [granularity, Granularity::Row];
            if is_own(client, granularities) {
                check(client, Gemm { codes: Codes::NanScale, granularities, out: BF16, ..Gemm::new(gemm.shape) });
            }
        }
    });
}

/// The kernel for few rows: every pair of granularities and all differences of its variants, each on one
/// of two architectures, which differ by the decoder alone; rows do not affect each other.
#[test]
fn gemv() {
    let Some(_running) = execute_shared() else { return };
    on_each([80, 90], |sm| {
        let client = &client(sm);
        let few = |name: &str| name.starts_with("scaled_gemm ") && name.contains(" gemv");
        let wanted = |name: &str| few(name) && !name.ends_with(" fast") || name.starts_with("scaled_gemm rows alone");
        let is_sampled = sample(u32::from(sm == 90));
        let count = kernel_tests::run(client, kernel_tests::Size::Small, |name| wanted(name) && is_sampled());
        let count = count.unwrap_or_else(|failure| panic!("sm_{sm}: {failure}"));
        assert!(count >= 100, "{count}");
        for granularity in Granularity::ALL {
            let path = |rows, config| GemmDevice::of(client).path(Some(rows), [granularity, Granularity::Row], config);
            assert_eq!([1, GEMV_ROWS].map(|rows| path(rows, PRECISE)), [GemmPath::Gemv; 2]);
            assert_ne!(path(GEMV_ROWS + 1, PRECISE), GemmPath::Gemv);
            assert_eq!(path(1, EMULATE), GemmPath::Emulated);
        }
    });
}

/// The kernel without matrix units, for every granularity of each side; `kernels` runs every pair on
/// wgpu.
#[test]
fn emulated() {
    let Some(_running) = execute_shared() else { return };
    let client = &client(90);
    for (i, left) in Granularity::ALL.into_iter().enumerate() {
        for (j, right) in Granularity::ALL.into_iter().enumerate().filter(|(j, _)| (i + j) % 2 == 0) {
            for shape in [[1, 1, 1], [65, 33, 40], [20, 70, 130], [130, 3, 257]] {
                let gemm = Gemm {
                    formats: [Format::ALL[i % 2], Format::ALL[j % 2]],
                    granularities: [left, right],
                    bias: Some((DTYPES[(i + j) % 3], 1 + j % 2)),
                    memory: Memory::Given,
                    config: EMULATE,
                    ..Gemm::new(shape)
                };
                check(client, gemm);
            }
        }
    }
}
