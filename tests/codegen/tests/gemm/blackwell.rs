//! The tiles of `tcgen05`, of a block and of two, interpreted, against sums in f64.

use checks::Gemm;
use codegen::device::{Execution, GenerateCuda, OfflineDevice, execute, on_each};
use cubecl_core::Runtime;
use float8_kernels::{Format, GemmPath, Granularity, gemm_path};

use super::{BF16, DTYPES, F16, F32, MX, PRECISE, check, memory};

/// Pairs that `tcgen05` multiplies: scaled by the epilogue, by the tensor cores, and step by step.
const GRANULARITIES: [[Granularity; 2]; 7] = [
    [Granularity::Tensor; 2],
    [Granularity::Row; 2],
    [MX; 2],
    [Granularity::Row, Granularity::Tensor],
    [Granularity::Block1x128, Granularity::Block128x128],
    [Granularity::Block1x128; 2],
    [Granularity::Block128x128, Granularity::Row],
];

/// Blackwell's tiles with and without scales of blocks, one after the other in a block and with split-K, whose
/// first scales of B lie at each place of a tile of scales; every output, with and without TMA.
#[test]
fn plans() {
    for seed in [0, 6] {
        let Some(_running) = execute(Execution { seed }) else { return };
        let [many, few] = [132, 2];
        let shapes = [
            // 128, 192 or 256 columns, several tiles to a block, the last ragged in every direction.
            ([300, 520, 300], few),
            ([128, 1024, 130], few),
            // 64 columns, and rows that TMA cannot write.
            ([40, 130, 900], many),
            ([129, 201, 31], many),
            // Split into ragged numbers of steps.
            ([60, 72, 2700], many),
            ([130, 67, 4100], many),
        ];
        on_each([many, few], |sms| {
            let client = &GenerateCuda::client(&OfflineDevice { sm: 100, sms });
            for (shape, _) in shapes.into_iter().filter(|(_, of)| *of == sms) {
                for (i, granularities) in GRANULARITIES.into_iter().enumerate() {
                    let path = gemm_path(client, granularities, PRECISE);
                    assert_eq!(path, GemmPath::Tcgen05, "{granularities:?}");
                    let formats = [Format::ALL[i % 2], Format::ALL[shape[0] % 2]];
                    for (j, out) in DTYPES.into_iter().enumerate() {
                        let bias = (j != i % 3).then_some((DTYPES[i % 3], 1 + i % 2));
                        let memory = memory((i + j) % 2 == 1);
                        check(client, Gemm { formats, granularities, bias, out, memory, ..Gemm::new(shape) });
                    }
                }
            }
        });
    }
}

/// Tiles that two blocks of a cluster make together, wide and narrow: several to a cluster, on one cluster and on two, with rows for
/// both blocks of the last and for one; contractions longer than the stages, of less than a step, and with split-K.
#[test]
fn pairs() {
    for seed in 0..3 {
        let Some(running) = execute(Execution { seed }) else { return };
        for (i, &granularities) in GRANULARITIES[..4].iter().enumerate() {
            let kind = if granularities[0] == MX { "mxf8f6f4.block_scale" } else { "f8f6f4" };
            let product = format!("tcgen05.mma.cta_group::2.kind::{kind}");
            let shapes = [([260, 260, 1000], 2), ([390, 516, 140], 4), ([129, 201, 31], 4), ([130, 67, 4100], 8)];
            let before = running.launches_of(&product);
            // Each on a device of its own.
            on_each([0, 1, 2, 3], |j| {
                let (shape, sms) = shapes[j];
                let gemm = Gemm {
                    formats: [Format::ALL[(i + j) % 2], Format::ALL[j % 2]],
                    granularities,
                    bias: Some((F32, 1)),
                    out: [F32, BF16, F16][(i + j) % 3],
                    memory: memory(j % 2 == 1),
                    ..Gemm::new(shape)
                };
                check(&GenerateCuda::client(&OfflineDevice { sm: 100, sms }), gemm);
            });
            assert!(running.launches_of(&product) >= before + shapes.len(), "a launch without {product}");
        }
    }
}
