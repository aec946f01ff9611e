//! The GEMMs of `tcgen05`, of `wgmma`, of `mma.sync` and of f16 matrix units, interpreted, against sums in f64: every pair of
//! formats and of granularities, every class of tile, ragged edges, biases, outputs and what they are added to, NaN and
//! infinities.

#[path = "gemm/blackwell.rs"]
mod blackwell;
#[path = "gemm/grouped.rs"]
mod grouped;
#[path = "gemm/stuck.rs"]
mod stuck;
#[path = "gemm/truncated.rs"]
mod truncated;

use codegen::device::{Execution, GenerateCuda, OfflineDevice, execute, on_each};
use codegen::random::Random;
use cubecl_core::Runtime;
use cubecl_core::ir::{ElemType, FloatKind, StorageType};
use cubecl_runtime::client::ComputeClient;
use float8_kernels::mx::to_blocked;
use float8_kernels::{
    Format, GemmConfig, GemmPath, Granularity, InvScale, Operand, Output, VectorView, gemm_path, reference, row_words,
    scaled_gemm_into,
};
use half::{bf16, f16};

type Client = ComputeClient<GenerateCuda>;

const FORMATS: [Format; 2] = [Format::E4m3, Format::E5m2];
const MX: Granularity = Granularity::Block1x32;
const GRANULARITIES: [Granularity; 5] =
    [Granularity::Tensor, Granularity::Row, Granularity::Block1x128, Granularity::Block128x128, MX];
const F32: StorageType = StorageType::Scalar(ElemType::Float(FloatKind::F32));
const F16: StorageType = StorageType::Scalar(ElemType::Float(FloatKind::F16));
const BF16: StorageType = StorageType::Scalar(ElemType::Float(FloatKind::BF16));

/// Compute capabilities, and what their GEMM is: without E8M0 scales, with those alone, and with those and others.
const PATHS: [(u16, [GemmPath; 3]); 5] = [
    (80, [GemmPath::F16Mma; 3]),
    (89, [GemmPath::Mma; 3]),
    (90, [GemmPath::Wgmma, GemmPath::Bf16Wgmma, GemmPath::Bf16Wgmma]),
    (100, [GemmPath::Tcgen05, GemmPath::Tcgen05, GemmPath::F16Mma]),
    (120, [GemmPath::Mma; 3]),
];

fn client(sm: u16) -> Client {
    GenerateCuda::client(&OfflineDevice::new(sm))
}

fn values(random: &mut Random, len: usize) -> Vec<f32> {
    (0..len).map(|_| random.value()).collect()
}

/// An operand on the host.
#[derive(Clone)]
struct Matrix {
    codes: Vec<u8>,
    inv_scales: Vec<f32>,
    shape: [usize; 2],
    format: Format,
    granularity: Granularity,
}

impl Matrix {
    fn random(shape: [usize; 2], format: Format, granularity: Granularity, random: &mut Random) -> Self {
        let [rows, k] = shape;
        let codes = values(random, rows * k).into_iter().map(|x| reference::encode(x, format)).collect();
        let scales = granularity.scale_dims(rows, k).iter().product();
        let inv_scales = values(random, scales).into_iter().map(|x| x.abs() * 0.01 + 1e-5);
        let power = |x: f32| f32::from_bits(x.to_bits() & 0x7f80_0000);
        let inv_scales = inv_scales.map(|x| if granularity == MX { power(x) } else { x }).collect();
        Self { codes, inv_scales, shape, format, granularity }
    }

    fn upload(&self, client: &Client) -> Operand {
        let [rows, k] = self.shape;
        let pitch = row_words(k) * 4;
        let mut bytes = vec![0; rows * pitch];
        for (padded, row) in bytes.chunks_exact_mut(pitch).zip(self.codes.chunks_exact(k)) {
            padded[..k].copy_from_slice(row);
        }
        let byte = |scale: &f32| InvScale::new(*scale).to_e8m0().expect("a power of two, or NaN");
        let scales = match self.granularity {
            MX => to_blocked(&self.inv_scales.iter().map(byte).collect::<Vec<_>>(), rows, k.div_ceil(32)),
            _ => f32_bytes(&self.inv_scales),
        };
        Operand {
            codes: client.create_from_slice(&bytes),
            inv_scale: client.create_from_slice(&scales),
            rows,
            k,
            format: self.format,
            granularity: self.granularity,
        }
    }

    /// Values with their scales.
    fn values(&self) -> Vec<f64> {
        let [_, k] = self.shape;
        let blocks = k.div_ceil(128);
        let scale = |i: usize| {
            let (row, block) = (i / k, i % k / 128);
            f64::from(
                self.inv_scales[match self.granularity {
                    Granularity::Tensor => 0,
                    Granularity::Row => row,
                    Granularity::Block1x128 => row * blocks + block,
                    Granularity::Block128x128 => row / 128 * blocks + block,
                    MX => row * k.div_ceil(32) + i % k / 32,
                }],
            )
        };
        let value = |(i, code): (usize, &u8)| f64::from(reference::decode(*code, self.format)) * scale(i);
        self.codes.iter().enumerate().map(value).collect()
    }
}

fn f32_bytes(x: &[f32]) -> Vec<u8> {
    x.iter().flat_map(|x| x.to_le_bytes()).collect()
}

fn to_bytes(x: &[f32], dtype: StorageType) -> Vec<u8> {
    match dtype {
        F16 => x.iter().flat_map(|x| f16::from_f32(*x).to_le_bytes()).collect(),
        BF16 => x.iter().flat_map(|x| bf16::from_f32(*x).to_le_bytes()).collect(),
        _ => f32_bytes(x),
    }
}

fn from_bytes(bytes: &[u8], dtype: StorageType) -> Vec<f32> {
    let halves = |bytes: &[u8]| u16::from_le_bytes([bytes[0], bytes[1]]);
    match dtype {
        F16 => bytes.chunks_exact(2).map(|x| f16::from_bits(halves(x)).to_f32()).collect(),
        BF16 => bytes.chunks_exact(2).map(|x| bf16::from_bits(halves(x)).to_f32()).collect(),
        _ => bytes.chunks_exact(4).map(|x| f32::from_le_bytes(x.try_into().unwrap())).collect(),
    }
}

/// What goes with the operands.
#[derive(Clone, Copy)]
struct Rest {
    bias: Option<(StorageType, usize)>,
    out: StorageType,
    accumulate: bool,
    use_fast_accum: bool,
}

const PLAIN: Rest = Rest { bias: None, out: F32, accumulate: false, use_fast_accum: false };

/// Runs the GEMM and compares every element with f64 sums, the error relative to the sum of magnitudes.
fn check(client: &Client, a: &Matrix, b: &Matrix, rest: Rest) {
    let ([m, k], [n, _]) = (a.shape, b.shape);
    let Rest { bias, out: dtype, accumulate, use_fast_accum } = rest;
    let mut random = Random(99);
    let rounded = |x: Vec<f32>, dtype| (to_bytes(&x, dtype), from_bytes(&to_bytes(&x, dtype), dtype));
    let shift = bias.map(|(dtype, stride)| {
        let mut memory = vec![f32::NAN; (n - 1) * stride + 1];
        memory.iter_mut().step_by(stride).for_each(|x| *x = random.unit());
        let (bytes, values) = rounded(memory, dtype);
        let view = VectorView { handle: client.create_from_slice(&bytes), len: n, stride, dtype };
        (view, values.into_iter().step_by(stride).collect::<Vec<_>>())
    });
    let (bytes, old) = rounded(if accumulate { values(&mut random, m * n) } else { vec![f32::NAN; m * n] }, dtype);
    let out = Output { handle: client.create_from_slice(&bytes), dtype, accumulate };
    let config = GemmConfig { use_fast_accum, emulate: false };
    let bias_view = shift.as_ref().map(|(view, _)| view);
    scaled_gemm_into(client, &a.upload(client), &b.upload(client), bias_view, &out, config).unwrap();
    let bytes = client.read_one(out.handle).unwrap_or_else(|error| panic!("{error:?}"));
    let got = from_bytes(&bytes, dtype);
    assert_eq!(got.len(), m * n);
    let (left, right) = (a.values(), b.values());
    // One rounding to the output, and those of f32 sums of blocks and of the whole.
    let half_step = half_step(dtype);
    for (i, row) in left.chunks_exact(k).enumerate() {
        for (j, col) in right.chunks_exact(k).enumerate() {
            let (mut want, mut size) = (0.0, 0.0);
            for (x, y) in row.iter().zip(col) {
                want += x * y;
                size += (x * y).abs();
            }
            let before = if accumulate { f64::from(old[i * n + j]) } else { 0.0 };
            let bias = shift.as_ref().map_or(0.0, |(_, values)| f64::from(values[j]));
            want += before + bias;
            size += before.abs() + bias.abs();
            let got = f64::from(got[i * n + j]);
            let bound = half_step * want.abs() + 2f64.powi(-20) * size + 2f64.powi(-25);
            let near = if want.is_finite() { (got - want).abs() <= bound } else { same(got, want) };
            assert!(
                near,
                "[{m}, {n}, {k}] {} {} by {} {}, {dtype}, element [{i}, {j}]: {got}, not {want}, bound {bound:e}",
                a.format, a.granularity, b.format, b.granularity
            );
        }
    }
}

/// Half a step of this dtype, relative to the value.
fn half_step(dtype: StorageType) -> f64 {
    match dtype {
        F16 => 2f64.powi(-11),
        BF16 => 2f64.powi(-8),
        _ => 2f64.powi(-24),
    }
}

fn same(x: f64, y: f64) -> bool {
    x == y || (x.is_nan() && y.is_nan())
}

/// Checks on a device of many SMs, which has each make a small tile, and on one of two, which make large ones, one
/// after the other or as a cluster.
fn each(check: impl Fn([&Client; 2]) + Sync) {
    let Some(_running) = execute(Execution::default()) else { return };
    on_each([80, 89, 90, 100, 120], |sm| {
        check([&client(sm), &GenerateCuda::client(&OfflineDevice { sm, sms: 2 })]);
    });
}

#[test]
fn paths() {
    for (sm, [plain, scaled, mixed]) in PATHS {
        for (granularities, path) in [
            ([Granularity::Row, Granularity::Tensor], plain),
            ([MX; 2], scaled),
            ([MX, Granularity::Tensor], mixed),
            ([Granularity::Block128x128, MX], mixed),
        ] {
            let emulate = GemmConfig { emulate: true, ..GemmConfig::default() };
            assert_eq!(gemm_path(&client(sm), granularities, GemmConfig::default()), path, "sm_{sm}");
            assert_eq!(gemm_path(&client(sm), granularities, emulate), GemmPath::Emulated, "sm_{sm}");
        }
    }
}

/// Rows, columns and contraction on both sides of the edges of chunks, products, steps, tiles and blocks.
#[test]
fn formats_and_ragged_shapes() {
    const SIDES: [usize; 10] = [1, 7, 16, 31, 64, 65, 128, 129, 200, 300];
    each(|[_, client]| {
        let mut random = Random(1);
        for (i, m) in SIDES.into_iter().enumerate() {
            // Each M with every other N, K going along.
            for j in (i % 2..SIDES.len()).step_by(2) {
                let (n, k) = (SIDES[(i + j) % SIDES.len()], SIDES[(3 * i + j) % SIDES.len()]);
                let (format_a, format_b) = (FORMATS[j % 2], FORMATS[j / 2 % 2]);
                let a = Matrix::random([m, k], format_a, Granularity::Tensor, &mut random);
                let b = Matrix::random([n, k], format_b, Granularity::Tensor, &mut random);
                check(client, &a, &b, PLAIN);
            }
        }
    });
}

#[test]
fn granularities() {
    each(|[many, one]| {
        let mut random = Random(2);
        for (i, left) in GRANULARITIES.into_iter().enumerate() {
            for (j, right) in GRANULARITIES.into_iter().enumerate() {
                let rest = Rest {
                    bias: (j % 2 == 1).then_some(([F32, F16, BF16][i % 3], 1 + i % 2)),
                    out: [F32, BF16, F16][(i + j) % 3],
                    accumulate: i % 2 == 1,
                    use_fast_accum: j / 2 % 2 == 1,
                };
                for ([m, n, k], client) in [([200, 253, 300], one), ([130, 258, 140], one), ([3, 131, 129], many)] {
                    let a = Matrix::random([m, k], FORMATS[i % 2], left, &mut random);
                    let b = Matrix::random([n, k], FORMATS[j % 2], right, &mut random);
                    check(client, &a, &b, rest);
                }
            }
        }
    });
}

/// Outputs whose tiles are gone through in several groups, and of tiles of each class with rows at an even element.
#[test]
fn many_tiles() {
    const BLOCKS: [Granularity; 2] = [Granularity::Block1x128, Granularity::Block128x128];
    each(|[many, one]| {
        let mut random = Random(3);
        for ([m, n, k], granularities, client) in [
            ([600, 202, 40], [Granularity::Row; 2], many),
            ([1400, 130, 20], [Granularity::Row; 2], one),
            ([200, 254, 300], BLOCKS, one),
            ([200, 254, 300], [Granularity::Tensor; 2], one),
            ([130, 258, 300], BLOCKS, one),
            ([600, 202, 40], [MX; 2], many),
            ([200, 254, 300], [MX; 2], one),
            ([130, 258, 300], [MX, Granularity::Block1x128], one),
        ] {
            let a = Matrix::random([m, k], Format::E4m3, granularities[0], &mut random);
            let b = Matrix::random([n, k], Format::E4m3, granularities[1], &mut random);
            for use_fast_accum in [false, true] {
                check(client, &a, &b, Rest { use_fast_accum, out: BF16, ..PLAIN });
            }
        }
    });
}

/// Hopper's tiles, low, narrow and large, with and without clusters, one after the other in a block; contractions in parts.
#[test]
fn hopper_plans() {
    let Some(_running) = execute(Execution { seed: 5 }) else { return };
    let [many, few] = [&client(90), &GenerateCuda::client(&OfflineDevice { sm: 90, sms: 2 })];
    let mut random = Random(8);
    for ([m, n, k], client) in [
        // 128 x 256, in clusters: four items of one cluster, the last row of tiles ragged.
        ([500, 504, 260], few),
        // The same alone.
        ([260, 510, 260], few),
        // 64 x 256, and 64 x 128.
        ([60, 500, 260], few),
        ([40, 250, 900], few),
        // 128 x 64 in clusters, two bands of rows.
        ([2200, 8, 130], few),
        // Split into ragged numbers of steps, alone and in clusters; rows that TMA can and cannot write.
        ([60, 72, 2700], many),
        ([200, 67, 4100], many),
    ] {
        for granularities in [
            [Granularity::Tensor; 2],
            [Granularity::Block1x128, Granularity::Block128x128],
            [Granularity::Block1x128; 2],
            [MX; 2],
            [Granularity::Block1x128, MX],
        ] {
            let a = Matrix::random([m, k], Format::E4m3, granularities[0], &mut random);
            let b = Matrix::random([n, k], Format::E5m2, granularities[1], &mut random);
            for use_fast_accum in [false, true] {
                let rest = Rest { use_fast_accum, out: BF16, bias: Some((F32, 1)), accumulate: use_fast_accum };
                check(client, &a, &b, rest);
            }
        }
    }
}

/// Contractions on both sides of the edges of blocks of 32, of words of four and of what a row is padded to.
#[test]
fn e8m0_ragged_contractions() {
    each(|[_, client]| {
        let mut random = Random(7);
        for (i, k) in [1, 16, 17, 31, 32, 33, 63, 96, 127, 128, 129, 159, 160, 257].into_iter().enumerate() {
            let (format_a, format_b) = (FORMATS[i % 2], FORMATS[i / 2 % 2]);
            let a = Matrix::random([33 + i, k], format_a, MX, &mut random);
            let b = Matrix::random([70 - i, k], format_b, [MX, Granularity::Row][i / 4 % 2], &mut random);
            check(client, &a, &b, Rest { use_fast_accum: i % 3 == 0, ..PLAIN });
            check(client, &b, &a, PLAIN);
        }
    });
}

/// Scales far apart whose products are not, and the least and the largest, of zeros.
#[test]
fn e8m0_far_scales() {
    each(|[_, client]| {
        let (m, n, k) = (130, 70, 270);
        let mut random = Random(9);
        for format in FORMATS {
            let mut a = Matrix::random([m, k], format, MX, &mut random);
            let mut b = Matrix::random([n, k], format, MX, &mut random);
            let blocks = k.div_ceil(32);
            for (matrix, sign) in [(&mut a, 1), (&mut b, -1)] {
                for (i, scale) in matrix.inv_scales.iter_mut().enumerate() {
                    *scale = 2f32.powi(sign * [90, -90, 40, 0, -127, 127][i % blocks % 6]);
                }
                for (i, code) in matrix.codes.iter_mut().enumerate() {
                    if i % k / 32 % 6 > 3 {
                        *code = 0;
                    }
                }
            }
            check(client, &a, &b, PLAIN);
        }
    });
}

/// Every code decodes to its value, NaN and infinity too: `A` holds one code a row, `B` ones.
#[test]
fn every_code() {
    each(|[client, _]| {
        for (format, granularity) in FORMATS.into_iter().flat_map(|f| [Granularity::Tensor, MX].map(|g| (f, g))) {
            let one = reference::encode(1.0, format);
            let mut a = Matrix::random([256, 40], format, granularity, &mut Random(4));
            a.codes.fill(0);
            for row in 0..256 {
                a.codes[row * 40 + row * 7 % 40] = row as u8;
            }
            let mut b = Matrix::random([70, 40], format, granularity, &mut Random(5));
            b.codes.fill(one);
            check(client, &a, &b, PLAIN);
            check(client, &b, &a, PLAIN);
        }
    });
}

/// NaN codes and NaN scales reach the outputs of their rows and columns and no others, infinities as in f64.
#[test]
fn not_finite() {
    each(|[_, client]| {
        let (m, n, k) = (140, 134, 300);
        let mut random = Random(6);
        for granularity in GRANULARITIES {
            let mut a = Matrix::random([m, k], Format::E4m3, granularity, &mut random);
            let mut b = Matrix::random([n, k], Format::E5m2, granularity, &mut random);
            a.codes[7 * k + 49] = 0xff;
            a.codes[139 * k + 299] = 0x7f;
            b.codes[k + 3] = 0x7c;
            b.codes[133 * k + 2] = 0xfd;
            check(client, &a, &b, PLAIN);
            let mut a = Matrix::random([m, k], Format::E4m3, granularity, &mut random);
            a.codes.fill(0);
            *a.inv_scales.last_mut().unwrap() = f32::NAN;
            let b = Matrix::random([n, k], Format::E4m3, Granularity::Row, &mut random);
            check(client, &a, &b, Rest { out: BF16, ..PLAIN });
        }
    });
}
