//! A device, and matrices to and from it.

use std::io::Write;
use std::sync::OnceLock;

use cubecl::ir::{ElemType, FloatKind, StorageType};
use cubecl::prelude::*;
use cubecl::server::Handle;
use cubecl::wgpu::{AutoGraphicsApi, GraphicsApi, WgpuDevice, WgpuRuntime};
use float8_kernels::reference::HostOperand;
use float8_kernels::{
    Cast, Format, Granularity, InvScale, MatrixView, Operand, ScaleCalculationMode, ScaleMode, VectorView, mx,
    row_words,
};
use half::{bf16, f16};
use proptest::prelude::*;
use proptest::sample::select;
pub(crate) use test_data::Random;

pub(crate) type Client = ComputeClient<WgpuRuntime>;

pub(crate) const F32: StorageType = StorageType::Scalar(ElemType::Float(FloatKind::F32));
pub(crate) const F16: StorageType = StorageType::Scalar(ElemType::Float(FloatKind::F16));
pub(crate) const BF16: StorageType = StorageType::Scalar(ElemType::Float(FloatKind::BF16));

pub(crate) const FORMATS: [Format; 2] = [Format::E4m3, Format::E5m2];
pub(crate) const MODES: [ScaleMode; 2] = [ScaleMode::F32, ScaleMode::PowerOfTwo];

pub(crate) const GRANULARITIES: [Granularity; 5] =
    [Granularity::Tensor, Granularity::Row, Granularity::Block1x128, Granularity::Block128x128, Granularity::Block1x32];

/// Says that a test, or a part of one, does not run. Not by `println!`, which the harness holds back while a test passes.
pub(crate) fn skip(why: &str) {
    let test = std::thread::current().name().unwrap_or_default().to_string();
    writeln!(std::io::stdout(), "{test}: skipped, {why}").expect("standard output is open");
}

/// The machine's default wgpu device. Without one the test says that it is skipped, and fails in CI.
pub(crate) fn client() -> Option<Client> {
    static AVAILABLE: OnceLock<bool> = OnceLock::new();
    let available = *AVAILABLE.get_or_init(|| {
        // Type 4 is every adapter. Asking for a client without one panics.
        !WgpuRuntime::enumerate_devices(4, &AutoGraphicsApi::backend()).is_empty()
    });
    if !available {
        assert!(std::env::var_os("CI").is_none(), "CI must have a wgpu adapter");
        skip("no wgpu adapter");
        return None;
    }
    Some(WgpuRuntime::client(&WgpuDevice::default()))
}

pub(crate) fn tensorwise(format: Format, scale_mode: ScaleMode) -> Cast {
    Cast { format, granularity: Granularity::Tensor, scale_mode }
}

/// A cast with the scales that this granularity has: `scale_mode`, or E8M0 by the default mode.
pub(crate) fn cast_with(format: Format, granularity: Granularity, scale_mode: ScaleMode) -> Cast {
    let is_mx = granularity == Granularity::Block1x32;
    Cast { format, granularity, scale_mode: if is_mx { ScaleMode::E8m0(Default::default()) } else { scale_mode } }
}

/// Every cast there is.
pub(crate) fn casts() -> impl Iterator<Item = Cast> {
    FORMATS.into_iter().flat_map(|format| {
        GRANULARITIES.into_iter().flat_map(move |granularity| {
            let modes = match granularity {
                Granularity::Block1x32 => ScaleCalculationMode::ALL.map(ScaleMode::E8m0).to_vec(),
                _ => MODES.to_vec(),
            };
            modes.into_iter().map(move |scale_mode| Cast { format, granularity, scale_mode })
        })
    })
}

pub(crate) fn any_cast() -> impl Strategy<Value = Cast> {
    select(casts().collect::<Vec<_>>())
}

/// The same bits, or both NaN.
pub(crate) fn same(a: f32, b: f32) -> bool {
    a.to_bits() == b.to_bits() || (a.is_nan() && b.is_nan())
}

/// Waits for the device and raises what went wrong on it.
pub(crate) fn sync(client: &Client) {
    cubecl::future::block_on(client.sync()).expect("device");
}

pub(crate) fn read_u32(client: &Client, handle: Handle) -> Vec<u32> {
    sync(client);
    u32::from_bytes(&client.read_one(handle).expect("read")).to_vec()
}

pub(crate) fn read_f32(client: &Client, handle: Handle) -> Vec<f32> {
    read_u32(client, handle).into_iter().map(f32::from_bits).collect()
}

pub(crate) fn upload_f32(client: &Client, x: &[f32]) -> Handle {
    client.create_from_slice(f32::as_bytes(x))
}

/// Bytes of `x` rounded to `dtype`, and the f32 values of the rounded elements.
pub(crate) fn to_dtype(x: &[f32], dtype: StorageType) -> (Vec<u8>, Vec<f32>) {
    if dtype == F32 {
        (f32::as_bytes(x).to_vec(), x.to_vec())
    } else if dtype == F16 {
        let x: Vec<f16> = x.iter().map(|&x| f16::from_f32(x)).collect();
        (f16::as_bytes(&x).to_vec(), x.iter().map(|x| x.to_f32()).collect())
    } else if dtype == BF16 {
        let x: Vec<bf16> = x.iter().map(|&x| bf16::from_f32(x)).collect();
        (bf16::as_bytes(&x).to_vec(), x.iter().map(|x| x.to_f32()).collect())
    } else {
        panic!("no conversion to {dtype}")
    }
}

/// How a matrix lies in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Layout {
    RowMajor,
    ColumnMajor,
    /// Row-major with rows padded by 3 elements.
    Pitched,
    /// Row-major with rows padded to a multiple of 64 elements, as CUDA does.
    AlignedPitch,
    /// Every third column of a wider matrix.
    Gapped,
    /// A slice that starts 256 bytes and some elements into an allocation.
    Offset,
}

pub(crate) const LAYOUTS: [Layout; 6] =
    [Layout::RowMajor, Layout::ColumnMajor, Layout::Pitched, Layout::AlignedPitch, Layout::Gapped, Layout::Offset];

/// Puts row-major `x` on the device in `layout`, everything outside the view being NaN, so that reading it shows.
pub(crate) fn upload(client: &Client, x: &[f32], shape: [usize; 2], layout: Layout, dtype: StorageType) -> MatrixView {
    let [rows, cols] = shape;
    assert_eq!(x.len(), rows * cols);
    let (offset, strides) = match layout {
        Layout::RowMajor => (0, [cols, 1]),
        Layout::ColumnMajor => (0, [1, rows]),
        Layout::Pitched => (0, [cols + 3, 1]),
        Layout::AlignedPitch => (0, [cols.next_multiple_of(64), 1]),
        Layout::Gapped => (0, [cols * 3, 3]),
        Layout::Offset => (256 + 3, [cols, 1]),
    };
    let len = offset + (rows - 1) * strides[0] + (cols - 1) * strides[1] + 1;
    let mut memory = vec![f32::NAN; len];
    for r in 0..rows {
        for c in 0..cols {
            memory[offset + r * strides[0] + c * strides[1]] = x[r * cols + c];
        }
    }
    let (bytes, _) = to_dtype(&memory, dtype);
    let element = bytes.len() / len;
    let mut handle = client.create_from_slice(&bytes);
    if offset > 0 {
        handle = handle.offset_start((offset * element) as u64);
    }
    MatrixView { handle, shape, strides, dtype }
}

/// The same with a vector.
pub(crate) fn upload_vector(client: &Client, x: &[f32], stride: usize, dtype: StorageType) -> VectorView {
    let mut memory = vec![f32::NAN; (x.len() - 1) * stride + 1];
    for (i, &x) in x.iter().enumerate() {
        memory[i * stride] = x;
    }
    let handle = client.create_from_slice(&to_dtype(&memory, dtype).0);
    VectorView { handle, len: x.len(), stride, dtype }
}

/// Codes of an operand without the padding, which must be zero.
pub(crate) fn read_codes(client: &Client, operand: &Operand) -> Vec<u8> {
    sync(client);
    let bytes = client.read_one(operand.codes.clone()).expect("read");
    let pitch = row_words(operand.k) * 4;
    assert!(pitch.is_multiple_of(16) && pitch >= operand.k && pitch < operand.k + 16);
    assert_eq!(bytes.len(), operand.rows * pitch);
    let mut codes = Vec::with_capacity(operand.rows * operand.k);
    for row in bytes.chunks_exact(pitch) {
        codes.extend_from_slice(&row[..operand.k]);
        assert!(row[operand.k..].iter().all(|&code| code == 0), "padding {:?}", &row[operand.k..]);
    }
    codes
}

/// An operand on the host.
#[derive(Clone, Debug)]
pub(crate) struct HostMatrix {
    pub(crate) codes: Vec<u8>,
    pub(crate) inv_scales: Vec<InvScale>,
    pub(crate) shape: [usize; 2],
    pub(crate) format: Format,
    pub(crate) granularity: Granularity,
}

impl HostMatrix {
    pub(crate) fn tensorwise(codes: &[u8], shape: [usize; 2], format: Format, inv_scale: f32) -> Self {
        let inv_scales = vec![InvScale::new(inv_scale)];
        Self { codes: codes.to_vec(), inv_scales, shape, format, granularity: Granularity::Tensor }
    }

    /// Any finite codes, so sums that cancel, and scales over some binades.
    pub(crate) fn random(shape: [usize; 2], format: Format, granularity: Granularity, seed: u64) -> Self {
        let mut random = Random::new(seed);
        let value = |random: &mut Random| random.unit() * (random.unit() * 6.0).exp2();
        let codes =
            (0..shape[0] * shape[1]).map(|_| float8_kernels::reference::encode(value(&mut random), format)).collect();
        let [height, width] = granularity.scale_dims(shape[0], shape[1]);
        let inv_scales = (0..height * width).map(|_| value(&mut random).abs() * 0.01 + 1e-5);
        let is_mx = granularity == Granularity::Block1x32;
        let power = |scale: f32| f32::from_bits(scale.to_bits() & 0x7f80_0000);
        let inv_scales = inv_scales.map(|scale| InvScale::new(if is_mx { power(scale) } else { scale })).collect();
        Self { codes, inv_scales, shape, format, granularity }
    }

    pub(crate) fn view(&self) -> HostOperand<'_> {
        let Self { codes, inv_scales, shape: [rows, k], format, granularity } = self;
        HostOperand { codes, rows: *rows, k: *k, format: *format, granularity: *granularity, inv_scales }
    }

    pub(crate) fn upload(&self, client: &Client) -> Operand {
        let &Self { shape: [rows, k], format, granularity, .. } = self;
        assert_eq!(self.codes.len(), rows * k);
        let pitch = row_words(k) * 4;
        let mut bytes = vec![0; rows * pitch];
        for (padded, row) in bytes.chunks_exact_mut(pitch).zip(self.codes.chunks_exact(k)) {
            padded[..k].copy_from_slice(row);
        }
        let inv_scale = if granularity == Granularity::Block1x32 {
            let bytes: Vec<u8> = self.inv_scales.iter().map(|scale| scale.to_e8m0().expect("a power of two")).collect();
            client.create_from_slice(&mx::to_blocked(&bytes, rows, k.div_ceil(32)))
        } else {
            upload_f32(client, &self.inv_scales.iter().map(|scale| scale.get()).collect::<Vec<_>>())
        };
        Operand { codes: client.create_from_slice(&bytes), inv_scale, rows, k, format, granularity }
    }

    pub(crate) fn read(client: &Client, operand: &Operand) -> Self {
        let &Operand { rows, k, format, granularity, .. } = operand;
        let inv_scales = if granularity == Granularity::Block1x32 {
            sync(client);
            let tiles = client.read_one(operand.inv_scale.clone()).expect("read");
            let bytes = mx::from_blocked(&tiles, rows, k.div_ceil(32));
            assert_eq!(mx::to_blocked(&bytes, rows, k.div_ceil(32)), tiles.to_vec(), "padding is zero");
            bytes.into_iter().map(InvScale::from_e8m0).collect()
        } else {
            read_f32(client, operand.inv_scale.clone()).into_iter().map(InvScale::new).collect()
        };
        Self { codes: read_codes(client, operand), inv_scales, shape: [rows, k], format, granularity }
    }
}

/// Uploads `codes [rows, k]` as a tensorwise operand.
pub(crate) fn upload_codes(
    client: &Client,
    codes: &[u8],
    shape: [usize; 2],
    format: Format,
    inv_scale: f32,
) -> Operand {
    HostMatrix::tensorwise(codes, shape, format, inv_scale).upload(client)
}

pub(crate) fn transpose<T: Copy>(x: &[T], [rows, cols]: [usize; 2]) -> Vec<T> {
    (0..cols).flat_map(|c| (0..rows).map(move |r| x[r * cols + c])).collect()
}
