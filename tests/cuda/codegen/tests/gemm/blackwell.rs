//! Interpreted `tcgen05` tiles of one and of two blocks, against sums in f64.

use codegen::device::{Execution, GenerateCuda, OfflineDevice, execute, on_each};
use codegen::variants::all_are_asked_for;
use cubecl_core::Runtime;
use float8_kernels::{Format, GemmPath, Granularity, Grouping, InvScale, gemm_path};
use kernel_tests::{Codes, Gemm, GroupSizes, Memory};

use super::{BF16, DTYPES, F16, F32, MX, PRECISE, check, check_operands};

/// Pairs that `tcgen05` multiplies: scaled by the epilogue, by the tensor cores, and step by step.
const GRANULARITIES: [[Granularity; 2]; 6] = [
    [Granularity::Tensor; 2],
    [Granularity::Row; 2],
    [MX; 2],
    [Granularity::Row, Granularity::Tensor],
    [Granularity::Block1x128, Granularity::Block128x128],
    [Granularity::Block1x128; 2],
];

/// Blackwell's tiles with and without scales of blocks, in sequence in a block and with split-K.
/// Their first scales of B are at each position of a tile of scales. Every output of each tile and of
/// each pair, with and without TMA.
#[test]
fn plans() {
    for seed in if all_are_asked_for() { vec![0, 6] } else { vec![6] } {
        let Some(_running) = execute(Execution { seed }) else { return };
        let [many, few] = [132, 2];
        let shapes = [
            // 128, 192 or 256 columns, several tiles per block, the last ragged in every direction.
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
            for (number, (shape, _)) in shapes.into_iter().enumerate().filter(|(_, (_, of))| *of == sms) {
                for (i, granularities) in GRANULARITIES.into_iter().enumerate() {
                    let path = gemm_path(client, granularities, PRECISE);
                    assert_eq!(path, GemmPath::Tcgen05, "{granularities:?}");
                    let formats = [Format::ALL[i % 2], Format::ALL[shape[0] % 2]];
                    let sampled = |j: usize| (number + i + j).is_multiple_of(3) || all_are_asked_for();
                    for (j, out) in DTYPES.into_iter().enumerate().filter(|(j, _)| sampled(*j)) {
                        let bias = (j != i % 3).then_some((DTYPES[i % 3], 1 + i % 2));
                        let memory = Memory::Given;
                        check(client, Gemm { formats, granularities, bias, out, memory, ..Gemm::new(shape) });
                    }
                }
            }
        });
    }
}

/// Tiles that two blocks of a cluster make together, wide and narrow. There are several per
/// cluster, on one and on two clusters, and the last has rows for both blocks or for one.
/// Contractions longer than the stages, shorter than a step, and with split-K.
#[test]
fn pairs() {
    for seed in 0..if all_are_asked_for() { 3 } else { 1 } {
        let Some(running) = execute(Execution { seed }) else { return };
        for (i, &granularities) in GRANULARITIES[..4].iter().enumerate() {
            let kind = if granularities[0] == MX { "mxf8f6f4.block_scale" } else { "f8f6f4" };
            let product = format!("tcgen05.mma.cta_group::2.kind::{kind}");
            let shapes = [([260, 260, 1000], 2), ([390, 516, 140], 4), ([129, 201, 31], 4), ([130, 67, 4100], 8)];
            let before = running.launches_of(&product);
            // Each on a separate device.
            on_each([0, 1, 2, 3], |j| {
                let (shape, sms) = shapes[j];
                let gemm = Gemm {
                    formats: [Format::ALL[(i + j) % 2], Format::ALL[j % 2]],
                    granularities,
                    bias: Some((F32, 1)),
                    out: [F32, BF16, F16][(i + j) % 3],
                    memory: Memory::Given,
                    ..Gemm::new(shape)
                };
                check(&GenerateCuda::client(&OfflineDevice { sm: 100, sms }), gemm);
            });
            assert!(running.launches_of(&product) >= before + shapes.len(), "a launch without {product}");
        }
    }
}

/// If all scales are powers of two, the tensor cores apply scales of blocks of 128, and the other
/// operand's scales of any granularity. Every bit is right if sums are exact, and a NaN scale gives
/// NaN. Other scales use the other kernel.
#[test]
fn scales_that_are_powers_of_two() {
    const BLOCK_SCALED: &str = "kind::mxf8f6f4.block_scale";
    const CODES: [Codes; 3] = [Codes::PowersOfTwo, Codes::Exact, Codes::NanScale];
    let Some(running) = execute(Execution { seed: 0 }) else { return };
    let pairs = [[Granularity::Block1x128, Granularity::Block128x128], [Granularity::Block1x128; 2]];
    let shapes = [([260, 260, 300], 2), ([129, 201, 31], 4), ([130, 67, 2100], 8)];
    on_each([0, 1, 2], |j| {
        let (shape, sms) = shapes[j];
        let client = &GenerateCuda::client(&OfflineDevice { sm: 100, sms });
        for (i, granularities) in pairs.into_iter().enumerate() {
            let formats = [Format::ALL[i % 2], Format::ALL[j % 2]];
            let (codes, out, memory) = (CODES[(i + j) % 3], DTYPES[(i + j) % 3], Memory::Given);
            let gemm = Gemm { formats, granularities, codes, out, memory, ..Gemm::new(shape) };
            let mut operands = gemm.matrices();
            if codes == Codes::NanScale {
                let scales = operands.iter_mut().flat_map(|operand| &mut operand.inv_scales);
                scales.filter(|scale| !scale.get().is_nan()).for_each(|scale| *scale = InvScale::new(0.5));
            }
            check_operands(client, gemm, operands.each_ref());
        }
    });
    assert_eq!(running.launches_of(BLOCK_SCALED), pairs.len() * shapes.len());
    let client = &GenerateCuda::client(&OfflineDevice { sm: 100, sms: 4 });
    check(client, Gemm { granularities: pairs[0], ..Gemm::new([129, 201, 31]) });
    assert_eq!(running.launches_of(BLOCK_SCALED), pairs.len() * shapes.len(), "scales that are no powers of two");
}

/// Groups whose scales are powers of two. Squares of B that two groups share, matrices of B that
/// start anywhere in a tile of scales, and empty groups.
#[test]
fn groups_whose_scales_are_powers_of_two() {
    let Some(running) = execute(Execution { seed: 0 }) else { return };
    let sizes: [GroupSizes; 2] = [(&[0, 70, 1, 0, 69], 10), (&[3, 290], 1)];
    on_each([132, 2], |sms| {
        let client = &GenerateCuda::client(&OfflineDevice { sm: 100, sms });
        for (i, (sizes, out)) in sizes.into_iter().zip([BF16, F32]).enumerate() {
            let right = Granularity::Block128x128;
            for (j, (grouping, rest, left)) in [
                (Grouping::Rows, [200, 300], Granularity::Block1x128),
                (Grouping::Rows, [128, 256], Granularity::Block1x128),
                (Grouping::Contraction, [130, 258], Granularity::Block1x128),
            ]
            .into_iter()
            .enumerate()
            {
                let codes = [Codes::PowersOfTwo, Codes::Exact][(i + j) % 2];
                let granularities = [left, right];
                check(client, Gemm { granularities, codes, out, ..Gemm::grouped(grouping, sizes, rest) });
            }
        }
    });
    assert_eq!(running.launches_of("kind::mxf8f6f4.block_scale"), 2 * 2 * 3);
}
