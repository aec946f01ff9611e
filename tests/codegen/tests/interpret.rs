//! The library's kernels, compiled to PTX for sm_90a and interpreted, against the scalar reference: codes and scales
//! bit for bit.

use codegen::device::{Execution, GenerateCuda, OfflineDevice, Running, execute};
use codegen::random::Random;
use cubecl_core::Runtime;
use cubecl_core::ir::{ElemType, FloatKind, StorageType};
use cubecl_core::server::Handle;
use cubecl_runtime::client::ComputeClient;
use float8_kernels::reference::{self, HostOperand};
use float8_kernels::{
    Cast, Format, GemmConfig, Granularity, InvScale, MatrixView, Operand, Orientation, ScaleMode, VectorView, quantize,
    row_words, scaled_gemm,
};
use half::{bf16, f16};

type Client = ComputeClient<GenerateCuda>;

const GRANULARITIES: [Granularity; 4] =
    [Granularity::Tensor, Granularity::Row, Granularity::Block1x128, Granularity::Block128x128];
const FLOATS: [FloatKind; 3] = [FloatKind::F32, FloatKind::F16, FloatKind::BF16];

fn start(seed: u64) -> Option<(Client, Running)> {
    let running = execute(Execution { seed })?;
    Some((GenerateCuda::client(&OfflineDevice::new(90)), running))
}

fn stored(kind: FloatKind) -> StorageType {
    StorageType::Scalar(ElemType::Float(kind))
}

/// Values over many binades, one in fifty special.
fn spiced(random: &mut Random, len: usize, special: &[f32]) -> Vec<f32> {
    (0..len)
        .map(|_| match random.bits() {
            bits if bits % 50 == 0 && !special.is_empty() => special[bits as usize / 50 % special.len()],
            _ => random.value(),
        })
        .collect()
}

/// Bytes of `x` in a format, and the values that they have.
fn rounded(x: &[f32], kind: FloatKind) -> (Vec<u8>, Vec<f32>) {
    let (bits, values): (Vec<Vec<u8>>, Vec<f32>) = x
        .iter()
        .map(|x| match kind {
            FloatKind::F16 => (f16::from_f32(*x).to_le_bytes().to_vec(), f16::from_f32(*x).to_f32()),
            FloatKind::BF16 => (bf16::from_f32(*x).to_le_bytes().to_vec(), bf16::from_f32(*x).to_f32()),
            _ => (x.to_le_bytes().to_vec(), *x),
        })
        .unzip();
    (bits.concat(), values)
}

fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.chunks_exact(4).map(|word| f32::from_le_bytes(word.try_into().unwrap())).collect()
}

fn read(client: &Client, handle: &Handle) -> Vec<u8> {
    client.read_one(handle.clone()).unwrap_or_else(|error| panic!("{error}")).to_vec()
}

fn same(a: f32, b: f32) -> bool {
    a.to_bits() == b.to_bits() || (a.is_nan() && b.is_nan())
}

/// A copy against the reference: scales, codes and zero padding.
fn check_copy(client: &Client, operand: &Operand, x: &[f32], [rows, cols]: [usize; 2], cast: Cast, transposed: bool) {
    let want = reference::quantize(x, rows, cols, cast, transposed);
    let what = format!("{cast:?} of {rows} x {cols}, transposed {transposed}");
    let scales = floats(&read(client, &operand.inv_scale));
    assert_eq!(scales.len(), want.scales.len(), "{what}");
    for (i, (got, want)) in scales.iter().zip(&want.scales).enumerate() {
        assert!(same(*got, want.inverse().get()), "{what}: scale {i} is {got}, not {:?}", want.inverse());
    }
    let codes = read(client, &operand.codes);
    let pitch = row_words(operand.k) * 4;
    for r in 0..operand.rows {
        for c in 0..pitch {
            let (got, i) = (codes[r * pitch + c], if transposed { c * cols + r } else { r * cols + c });
            let want = if c < operand.k { want.codes[i] } else { 0 };
            assert_eq!(got, want, "{what}: code [{r}, {c}]");
        }
    }
}

fn check_casts(client: &Client, shape: [usize; 2], kind: FloatKind, casts: &[Cast], special: &[f32], pitch: usize) {
    let [rows, cols] = shape;
    let (_, x) = rounded(&spiced(&mut Random(7), rows * cols, special), kind);
    let mut memory = vec![f32::NAN; (rows - 1) * pitch + cols];
    for (r, row) in x.chunks(cols).enumerate() {
        memory[r * pitch..r * pitch + cols].copy_from_slice(row);
    }
    let handle = client.create_from_slice(&rounded(&memory, kind).0);
    let view = MatrixView { handle, shape, strides: [pitch, 1], dtype: stored(kind) };
    for cast in casts {
        for orientation in [Orientation::Rows, Orientation::Cols, Orientation::Both] {
            let made = quantize(client, &view, *cast, orientation).unwrap();
            for (copy, transposed) in [(&made.rows, false), (&made.cols, true)] {
                if let Some(copy) = copy {
                    check_copy(client, copy, &x, shape, *cast, transposed);
                }
            }
            let amax = floats(&read(client, &made.amax));
            assert!(same(reference::amax(&amax), reference::amax(&x)), "{cast:?} of {shape:?}: amax");
        }
    }
}

fn casts(format: Format, scale_mode: ScaleMode) -> Vec<Cast> {
    GRANULARITIES.map(|granularity| Cast { format, granularity, scale_mode }).to_vec()
}

#[test]
fn casts_of_every_dtype_and_granularity() {
    let Some((client, _running)) = start(0) else { return };
    for kind in FLOATS {
        check_casts(&client, [66, 130], kind, &casts(Format::E4m3, ScaleMode::F32), &[0.0, -0.0, 1e-7], 130);
        check_casts(&client, [33, 64], kind, &casts(Format::E5m2, ScaleMode::PowerOfTwo), &[], 67);
    }
}

#[test]
fn casts_of_ragged_shapes() {
    let Some((client, _running)) = start(3) else { return };
    for shape in [[1, 1], [1, 300], [129, 17]] {
        check_casts(&client, shape, FloatKind::BF16, &casts(Format::E4m3, ScaleMode::F32), &[], shape[1]);
    }
}

#[test]
fn casts_of_special_values() {
    let Some((client, _running)) = start(0) else { return };
    let special = [f32::NAN, -f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 0.0, -0.0, 1e-40, -3e38];
    let some = [Granularity::Row, Granularity::Block1x128];
    for format in [Format::E4m3, Format::E5m2] {
        let casts = some.map(|granularity| Cast { format, granularity, scale_mode: ScaleMode::F32 });
        check_casts(&client, [40, 96], FloatKind::F32, &casts, &special, 96);
    }
}

struct HostMatrix {
    codes: Vec<u8>,
    inv_scales: Vec<InvScale>,
    shape: [usize; 2],
    format: Format,
    granularity: Granularity,
}

impl HostMatrix {
    fn random(random: &mut Random, shape: [usize; 2], format: Format, granularity: Granularity) -> Self {
        let [rows, k] = shape;
        let codes = spiced(random, rows * k, &[]).iter().map(|x| reference::encode(*x, format)).collect();
        let [height, width] = granularity.scale_dims(rows, k);
        let inv_scales = (0..height * width).map(|_| InvScale::new(random.unit().abs() + 0.01)).collect();
        Self { codes, inv_scales, shape, format, granularity }
    }

    fn view(&self) -> HostOperand<'_> {
        let Self { codes, inv_scales, shape: [rows, k], format, granularity } = self;
        HostOperand { codes, rows: *rows, k: *k, format: *format, granularity: *granularity, inv_scales }
    }

    /// The same with positive codes.
    fn magnitudes(&self) -> Self {
        let codes = self.codes.iter().map(|code| code & 0x7f).collect();
        Self { codes, inv_scales: self.inv_scales.clone(), ..*self }
    }

    fn upload(&self, client: &Client) -> Operand {
        let &Self { shape: [rows, k], format, granularity, .. } = self;
        let mut bytes = vec![0; rows * row_words(k) * 4];
        for (padded, row) in bytes.chunks_exact_mut(row_words(k) * 4).zip(self.codes.chunks_exact(k)) {
            padded[..k].copy_from_slice(row);
        }
        let scales: Vec<u8> = self.inv_scales.iter().flat_map(|scale| scale.get().to_le_bytes()).collect();
        let (codes, inv_scale) = (client.create_from_slice(&bytes), client.create_from_slice(&scales));
        Operand { codes, inv_scale, rows, k, format, granularity }
    }
}

#[test]
fn gemms_of_every_granularity() {
    let Some((client, _running)) = start(0) else { return };
    let mut random = Random(11);
    let shapes = [[1, 1, 1], [65, 33, 40], [20, 70, 130], [130, 3, 257]];
    for (i, shape) in shapes.into_iter().cycle().take(8).enumerate() {
        let [m, n, k] = shape;
        let formats = [[Format::E4m3, Format::E5m2][i % 2], [Format::E4m3, Format::E5m2][i / 2 % 2]];
        let a = HostMatrix::random(&mut random, [m, k], formats[0], GRANULARITIES[i % 4]);
        let b = HostMatrix::random(&mut random, [n, k], formats[1], GRANULARITIES[(i + i / 4) % 4]);
        let (bytes, bias) = rounded(&spiced(&mut random, n, &[]), FLOATS[i % 3]);
        let handle = client.create_from_slice(&bytes);
        let view = VectorView { handle, len: n, stride: 1, dtype: stored(FLOATS[i % 3]) };
        let config = GemmConfig { emulate: true, ..GemmConfig::default() };
        let (left, right) = (a.upload(&client), b.upload(&client));
        let out = scaled_gemm(&client, &left, &right, Some(&view), stored(FloatKind::F32), config).unwrap();
        let got = floats(&read(&client, &out));
        let want = reference::scaled_gemm_f64(&a.view(), &b.view(), Some(&bias));
        let size: Vec<f32> = bias.iter().map(|bias| bias.abs()).collect();
        let size = reference::scaled_gemm_f64(&a.magnitudes().view(), &b.magnitudes().view(), Some(&size));
        assert_eq!(got.len(), want.len());
        for (i, ((got, want), size)) in got.iter().zip(want).zip(size).enumerate() {
            let error = (f64::from(*got) - want).abs();
            assert!(error <= 1e-5 * size, "{shape:?}, element {i}: {got}, not {want}");
        }
    }
}
