//! Joined shards equal the cast of the whole matrix, padding words included.

use burn_backend::TensorData;
use burn_backend::ops::FloatTensorOps;
use burn_backend::tensor::{Device, FloatTensor};
use burn_float8::backend::{Float8Backend, GivenAmax, HostCodes, Quantized};
use cubecl::Runtime;
use cubecl::wgpu::{AutoGraphicsApi, GraphicsApi, WgpuRuntime};
use float8_kernels::{Cast, Format, Orientation, ScaleCalculationMode, ScaleMode};

use super::*;
use crate::ShardBackend;

type B = burn_cubecl::CubeBackend<WgpuRuntime, f32, i32, u32>;

/// Whether a wgpu adapter is available.
fn has_adapter() -> bool {
    // Type 4 means every adapter. Requesting a client without an adapter panics.
    let found = !WgpuRuntime::enumerate_devices(4, &AutoGraphicsApi::backend()).is_empty();
    if !found {
        test_data::skip(test_data::VULKAN);
    }
    found
}

/// `[K, N]` with a wide range of magnitudes, optionally with a NaN.
fn values([k, n]: [usize; 2], nan: bool) -> Vec<f32> {
    let value = |i: usize| {
        let x = (i.wrapping_mul(2_654_435_761) >> 7 & 0xffff) as f32 / 32768.0 - 1.0;
        x * 4f32.powi((i / 37 % 9) as i32 - 4)
    };
    let mut values: Vec<f32> = (0..k * n).map(value).collect();
    if nan {
        values[k * n / 2] = f32::NAN;
    }
    values
}

fn tensor(values: Vec<f32>, n: usize, device: &Device<B>) -> FloatTensor<B> {
    let rows = values.len() / n;
    B::float_from_data(TensorData::new(values, [rows, n]), device)
}

fn quantize(x: FloatTensor<B>, cast: Cast, axis: ShardedAxis, amax: Option<f32>) -> DeviceOperand<B> {
    let device = x.device.clone();
    let orientation = match axis {
        ShardedAxis::Rows => Orientation::Rows,
        ShardedAxis::Contraction => Orientation::Cols,
    };
    let given = amax.map(|amax| {
        let amax = B::float_from_data(TensorData::new(vec![amax], [1]), &device);
        GivenAmax { amax, observe: false }
    });
    let Quantized { rows, cols, .. } = B::fp8_quantize(x, cast, orientation, given);
    rows.or(cols).unwrap()
}

/// Largest magnitude; NaN wins.
fn amax<'a>(values: impl Iterator<Item = &'a f32>) -> f32 {
    f32::from_bits(values.map(|x| x.abs().to_bits()).max().unwrap())
}

/// Operands of each rank's rows.
fn shards(
    whole: &[f32],
    n: usize,
    cast: Cast,
    shards: Shards,
    ranks: usize,
    device: &Device<B>,
) -> Vec<DeviceOperand<B>> {
    let Shards { axis, chunk, .. } = shards;
    let mut padded = whole.to_vec();
    padded.resize(ranks * chunk * n, 0.0);
    let reads_columns = cast.granularity == Granularity::Row && axis == ShardedAxis::Contraction;
    let one = (cast.granularity == Granularity::Tensor).then(|| amax(whole.iter()));
    let columns: Vec<f32> = (0..n).map(|j| amax(whole[j..].iter().step_by(n))).collect();
    padded
        .chunks_exact(chunk * n)
        .map(|own| {
            let mut own = own.to_vec();
            if reads_columns {
                own.extend(&columns);
            }
            quantize(tensor(own, n, device), cast, axis, one)
        })
        .collect()
}

fn words(t: &CubeTensor<WgpuRuntime>) -> Vec<u32> {
    let bytes = t.client.read_one(t.handle.clone()).unwrap();
    bytes.as_chunks().0.iter().take(t.shape().num_elements()).map(|word| u32::from_le_bytes(*word)).collect()
}

/// Concatenates the words of each rank, as a gather does.
fn gather(ranks: &[Vec<CubeTensor<WgpuRuntime>>], part: usize) -> CubeTensor<WgpuRuntime> {
    let first = &ranks[0][part];
    let dims = first.shape();
    let all: Vec<u8> = ranks.iter().flat_map(|parts| words(&parts[part])).flat_map(|word| word.to_le_bytes()).collect();
    let shape = Shape::from(vec![ranks.len(), dims[0], dims[1]]);
    let handle = first.client.create_from_slice(&all);
    CubeTensor::new_contiguous(first.client.clone(), first.device.clone(), shape, handle, first.dtype)
}

fn check([k, n]: [usize; 2], ranks: usize, granularity: Granularity, axis: ShardedAxis, nan: bool) {
    let device = Default::default();
    let scale_mode = match granularity {
        Granularity::Block1x32 => ScaleMode::E8m0(ScaleCalculationMode::Rceil),
        _ => ScaleMode::F32,
    };
    let cast = Cast { format: Format::E4m3, granularity, scale_mode };
    let align = match granularity {
        Granularity::Tensor | Granularity::Row => 16,
        _ => 128,
    };
    let how = Shards { axis, chunk: k.div_ceil(ranks).next_multiple_of(align), len: k };
    let whole = values([k, n], nan);
    let own: Vec<_> = shards(&whole, n, cast, how, ranks, &device);
    let parts: Vec<_> = own.iter().map(|shard| Joined::new(shard, how).parts()).collect();
    let gathered = (0..parts[0].len()).map(|part| gather(&parts, part)).collect();
    let got = Joined::new(&own[ranks - 1], how).join(gathered);
    let one = (granularity == Granularity::Tensor).then(|| amax(whole.iter()));
    let host = B::fp8_read(&quantize(tensor(whole, n, &device), cast, axis, one));
    let want = B::fp8_write(host.clone(), &device);
    let name = format!("[{k}, {n}] over {ranks} ranks, {granularity} {axis:?}, NaN: {nan}");
    let read = B::fp8_read(&got);
    assert_eq!((read.codes == host.codes, read.dims), (true, host.dims), "{name}: codes");
    let bits = |scales: &[float8_kernels::InvScale]| scales.iter().map(|s| s.get().to_bits()).collect::<Vec<_>>();
    assert_eq!(bits(&read.inv_scales), bits(&host.inv_scales), "{name}: scales");
    assert_eq!(words(&got.codes), words(&want.codes), "{name}: words of codes");
    assert_eq!(words(&got.inv_scale), words(&want.inv_scale), "{name}: words of scales");
    assert_eq!(B::fp8_size(&got), B::fp8_size(&want), "{name}");
    assert_eq!((got.codes.dtype, got.inv_scale.dtype), (want.codes.dtype, want.inv_scale.dtype), "{name}");
}

/// A crop on the device has the words of one on the host.
#[test]
fn crops_have_the_first_codes_of_rows() {
    if !has_adapter() {
        return;
    }
    let (device, [rows, k]) = (Default::default(), [5, 65]);
    let cast = Cast { format: Format::E4m3, granularity: Granularity::Row, scale_mode: ScaleMode::F32 };
    let whole = quantize(tensor(values([rows, k], true), k, &device), cast, ShardedAxis::Rows, None);
    for len in [64, 49] {
        let (got, host) = (B::cropped(&whole, len, &device), B::fp8_read(&whole));
        let codes = host.codes.chunks_exact(k).flat_map(|row| &row[..len]).copied().collect();
        let want = B::fp8_write(HostCodes { codes, dims: [rows, len], ..host }, &device);
        assert_eq!(words(&got.codes), words(&want.codes), "{len}: codes");
        assert_eq!(words(&got.inv_scale), words(&want.inv_scale), "{len}: scales");
        assert_eq!(B::fp8_size(&got), B::fp8_size(&want), "{len}");
    }
}

#[test]
fn joined_shards_are_the_cast_of_the_whole() {
    if !has_adapter() {
        return;
    }
    // One rank with only padding; whole chunks; odd lengths; a single row.
    let cases = [([40, 24], 2), ([130, 33], 3), ([256, 144], 2), ([385, 130], 3), ([300, 17], 5), ([1, 129], 2)];
    for (dims, ranks) in cases {
        for granularity in Granularity::ALL {
            for axis in [ShardedAxis::Rows, ShardedAxis::Contraction] {
                check(dims, ranks, granularity, axis, false);
            }
        }
    }
}

#[test]
fn padding_is_zero_beside_a_nan() {
    if !has_adapter() {
        return;
    }
    for granularity in Granularity::ALL {
        for axis in [ShardedAxis::Rows, ShardedAxis::Contraction] {
            check([150, 33], 2, granularity, axis, true);
        }
    }
}
