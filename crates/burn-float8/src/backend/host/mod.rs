//! The host path for CPU backends. It reads a tensor to the host and casts it with the kernels'
//! reference implementation. The GEMM decodes the codes and runs the backend's f32 matmul. Reading
//! a CPU tensor is free or a copy.
mod adamw;
mod attention;
mod bytes;
mod codes;
mod fused;
mod gemv;
mod grouped;
mod implement;
mod loops;
mod scales;
mod vector;
mod view;

use std::borrow::Cow;
use std::sync::Arc;

use burn_backend::tensor::{Device, FloatTensor, IntTensor};
use burn_backend::{Backend, DType, ExecutionError, FloatDType, TensorData, TensorMetadata};
use burn_std::Shape;
use float8_kernels::{Cast, Format, Granularity, Orientation, Scale, reference};

use super::{GivenAmax, GroupEnds, HostCodes, in_dtype};
use bytes::CodeBytes;
pub use codes::{amax, inv_scale};
pub(crate) use grouped::ranges;
pub use implement::HostBackend;
use loops::transpose;
use scales::Scales;

/// FP8 codes in host memory.
///
/// Both orientations share the codes if one scale serves both.
#[derive(Clone)]
pub struct HostOperand<D> {
    device: D,
    /// Row-major `[dims[0], dims[1]]`.
    codes: Arc<CodeBytes>,
    dims: [usize; 2],
    /// Whether the operand is the transpose of `codes`.
    transposed: bool,
    /// Inverse scales with `granularity.scale_dims` of the operand, transposed together with the
    /// codes.
    inv_scales: Arc<Scales>,
    format: Format,
    granularity: Granularity,
}

impl<D> core::fmt::Debug for HostOperand<D> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        let Self { dims, transposed, format, granularity, .. } = self;
        write!(f, "HostOperand {{ {format} {granularity} {dims:?}, transposed: {transposed} }}")
    }
}

impl<D> HostOperand<D> {
    /// Rows and contraction length.
    fn matrix(&self) -> [usize; 2] {
        let [rows, cols] = self.dims;
        if self.transposed { [cols, rows] } else { [rows, cols] }
    }

    /// Rows and columns of the codes that share a scale.
    fn group(&self) -> [usize; 2] {
        let [rows, k] = self.matrix();
        let [height, width] = self.granularity.group(rows, k);
        if self.transposed { [width, height] } else { [height, width] }
    }

    /// [`group`](Self::group), if scales are per block.
    fn block(&self) -> Option<[usize; 2]> {
        let is_block = !matches!(self.granularity, Granularity::Tensor | Granularity::Row);
        is_block.then(|| self.group())
    }

    /// Rows and columns of the scales in memory.
    fn scale_dims(&self) -> [usize; 2] {
        let [rows, k] = self.matrix();
        let [height, width] = self.granularity.scale_dims(rows, k);
        if self.transposed { [width, height] } else { [height, width] }
    }
}

/// Copies by rows and by columns, if requested.
type HostCopies<D> = [Option<HostOperand<D>>; 2];

/// `fp8_quantize` of a tensor of any backend: the copies and the amax.
pub(super) fn quantize<B: Backend>(
    x: FloatTensor<B>,
    cast: Cast,
    orientation: Orientation,
    given: Option<GivenAmax<FloatTensor<B>>>,
) -> (HostCopies<Device<B>>, FloatTensor<B>) {
    let device = B::float_device(&x);
    let dims = matrix(&x.shape());
    let values = &*floats::<B>(&x);
    let operand = |transposed, codes: Vec<u8>, scales: &[Scale]| HostOperand {
        device: device.clone(),
        codes: Arc::new(codes.into()),
        dims,
        transposed,
        inv_scales: Arc::new(Scales::new(scales.iter().map(|s| s.inverse()).collect(), cast.granularity)),
        format: cast.format,
        granularity: cast.granularity,
    };
    let amax_tensor = |amax: f32| B::float_from_data(TensorData::new(vec![amax], [1]), &device);
    // Whether both orientations have the same codes and scales.
    let shared = matches!(cast.granularity, Granularity::Tensor | Granularity::Block128x128);
    let (by_rows, by_cols, amax) = match (cast.granularity, given) {
        (Granularity::Tensor, Some(GivenAmax { amax, observe })) => {
            let scaling = reference::amax(&read_f32::<B>(amax.clone()));
            let scale = reference::amax_to_scale(scaling, cast.format, cast.scale_mode);
            let made = (loops::encode(values, scale, cast.format), vec![scale], scaling);
            (Some(made), None, if observe { amax_tensor(loops::amax(values)) } else { amax })
        }
        _ => {
            let (by_rows, by_cols) = (orientation.rows() || shared, orientation.cols() && !shared);
            let made = |transposed| loops::quantize(values, dims, cast, transposed);
            let (by_rows, by_cols) = rayon::join(|| by_rows.then(|| made(false)), || by_cols.then(|| made(true)));
            let amax = by_rows.as_ref().or(by_cols.as_ref()).map(|(_, _, amax)| *amax);
            (by_rows, by_cols, amax_tensor(amax.expect("at least one orientation")))
        }
    };
    let copy = |transposed| move |(codes, scales, _): loops::Quantized| operand(transposed, codes, &scales);
    let (rows, cols) = (by_rows.map(copy(false)), by_cols.map(copy(true)));
    let flipped = rows.as_ref().map(|rows| HostOperand { transposed: true, ..rows.clone() });
    ([rows.filter(|_| orientation.rows()), cols.or(flipped.filter(|_| orientation.cols()))], amax)
}

/// `fp8_matmul` on the host: `B`'s f32 matmul, or a product on the codes if there are few rows.
/// With groups it waits for the device.
///
/// Tensor and row scales are applied to the sums. Block scales are applied to the decoded values,
/// each rounded once to f32. This is exact if scales are powers of two (E8M0).
pub(super) fn matmul<B: Backend>(
    operands: [&HostOperand<Device<B>>; 2],
    bias: Option<FloatTensor<B>>,
    groups: Option<GroupEnds<IntTensor<B>>>,
    shape: Shape,
    dtype: FloatDType,
) -> FloatTensor<B> {
    match groups {
        None => product::<B>(operands, bias, shape, dtype),
        Some(groups) => grouped::matmul::<B>(operands, groups, shape, dtype),
    }
}

/// y = a · bᵀ + bias.
fn product<B: Backend>(
    [a, b]: [&HostOperand<Device<B>>; 2],
    bias: Option<FloatTensor<B>>,
    shape: Shape,
    dtype: FloatDType,
) -> FloatTensor<B> {
    let mut y = loops::in_pool(|| match gemv::sums(a, b) {
        Some(sums) => B::float_from_data(TensorData::new(sums, [a.matrix()[0], b.matrix()[0]]), &a.device),
        None => {
            let (left, right) = rayon::join(|| values(a), || values(b));
            B::float_matmul(stored::<B>(a, left, false), stored::<B>(b, right, true))
        }
    });
    let tensor_scale = |o: &HostOperand<_>| match o.granularity {
        Granularity::Tensor => o.inv_scales.get(0).get(),
        _ => 1.0,
    };
    let bias = bias.as_ref().map(floats::<B>);
    let [of_rows, of_cols] = [a, b].map(|o| (o.granularity == Granularity::Row).then(|| o.inv_scales.values()));
    let epilogue = loops::Epilogue {
        scale: tensor_scale(a) * tensor_scale(b),
        rows: of_rows.as_deref(),
        cols: of_cols.as_deref(),
        bias: bias.as_deref(),
    };
    if !epilogue.is_identity() {
        let n = b.matrix()[0];
        y = map_floats::<B>(y, |sums| epilogue.apply(sums, n));
    }
    in_dtype::<B>(B::float_reshape(y, shape), dtype.into())
}

/// `fp8_health` on the host.
fn health<B: Backend>(x: FloatTensor<B>, operand: &HostOperand<Device<B>>, transposed: bool) -> FloatTensor<B> {
    let [rows, cols] = matrix(&x.shape());
    let values = &*floats::<B>(&x);
    let values = if transposed { transpose(values, [rows, cols]) } else { values.to_vec() };
    let HostCodes { codes, dims: [rows, k], format, granularity, inv_scales, .. } = read_codes(operand);
    let host = reference::HostOperand { codes: &codes, rows, k, format, granularity, inv_scales: &inv_scales };
    let health = reference::health(&values, &host);
    // Two partial sums each, so that f32 holds counts exactly and sums to 48 bits.
    let counts = [health.saturated, health.flushed, health.non_finite].map(|n| {
        let low = n % (1 << 20);
        [low as f32, (n - low) as f32]
    });
    let sums = [health.signal, health.noise].map(|sum| {
        let high = sum as f32;
        [high, if high.is_finite() { (sum - f64::from(high)) as f32 } else { 0.0 }]
    });
    let [signal, noise] = sums;
    let [saturated, flushed, non_finite] = counts;
    let rows = [0, 1].map(|i| [signal[i], noise[i], saturated[i], flushed[i], non_finite[i]]);
    B::float_from_data(TensorData::new(rows.concat(), [2, 5]), &operand.device)
}

/// `fp8_read` on the host.
pub(super) fn read_codes<D>(operand: &HostOperand<D>) -> HostCodes {
    let (codes, inv_scales) = match operand.transposed {
        true => {
            (transpose(&operand.codes, operand.dims), transpose(&operand.inv_scales.values(), operand.scale_dims()))
        }
        false => (operand.codes.to_vec(), operand.inv_scales.values().into_owned()),
    };
    HostCodes {
        codes,
        dims: operand.matrix(),
        format: operand.format,
        granularity: operand.granularity,
        inv_scales,
        transposed: operand.transposed,
    }
}

/// `fp8_write` on the host.
pub(super) fn write_codes<D: Clone>(codes: HostCodes, device: &D) -> HostOperand<D> {
    let HostCodes { codes, dims: dims @ [rows, k], format, granularity, inv_scales, transposed } = codes;
    let (codes, inv_scales, dims) = match transposed {
        true => {
            let scales = transpose(&inv_scales, granularity.scale_dims(rows, k));
            (transpose(&codes, dims), scales, [k, rows])
        }
        false => (codes, inv_scales, dims),
    };
    let (codes, inv_scales) = (Arc::new(codes.into()), Arc::new(Scales::new(inv_scales, granularity)));
    HostOperand { device: device.clone(), codes, dims, transposed, inv_scales, format, granularity }
}

/// Values of a tensor in f32. Waits for the device.
#[doc(hidden)]
pub fn read_f32<B: Backend>(x: FloatTensor<B>) -> Vec<f32> {
    read::<B>(x).into_vec().expect("converted to f32")
}

fn read<B: Backend>(x: FloatTensor<B>) -> TensorData {
    data(B::float_into_data(x)).convert::<f32>()
}

/// Values of an int tensor. Waits for the device.
fn read_ints<B: Backend>(x: &IntTensor<B>) -> Vec<i64> {
    data(B::int_into_data(x.clone())).iter::<i64>().collect()
}

fn data(of: impl Future<Output = Result<TensorData, ExecutionError>>) -> TensorData {
    burn_std::future::block_on(of).expect("a tensor that exists can be read")
}

/// A tensor of these values and dtype, on the device of `like`.
fn tensor_on<B: Backend>(
    like: &FloatTensor<B>,
    values: Vec<f32>,
    shape: impl Into<Shape>,
    dtype: DType,
) -> FloatTensor<B> {
    let tensor = B::float_from_data(TensorData::new(values, shape.into()), &B::float_device(like));
    in_dtype::<B>(tensor, dtype)
}

/// Casts between f32 and bf16 on all cores. None for other dtypes, which Burn casts through an f64
/// copy on one core.
#[cfg(feature = "flex")]
pub(super) fn cast<B: Backend>(x: &FloatTensor<B>, dtype: DType) -> Option<FloatTensor<B>> {
    let flex = (x as &dyn core::any::Any).downcast_ref::<burn_flex::FlexTensor>()?;
    let data = match dtype {
        DType::BF16 => TensorData::new(loops::narrowed(flex.as_slice()?), x.shape()),
        DType::F32 => TensorData::new(loops::widened(flex.as_slice()?), x.shape()),
        _ => return None,
    };
    Some(B::float_from_data(data, &B::float_device(x)))
}

/// Values of a tensor in f32, borrowed if the backend exposes them.
fn floats<B: Backend>(x: &FloatTensor<B>) -> Cow<'_, [f32]> {
    #[cfg(feature = "flex")]
    if let Some(x) = (x as &dyn core::any::Any).downcast_ref::<burn_flex::FlexTensor>() {
        if let Some(values) = x.as_slice::<f32>() {
            return Cow::Borrowed(values);
        }
        if let Some(values) = x.as_slice() {
            return Cow::Owned(loops::widened(values));
        }
    }
    Cow::Owned(read_f32::<B>(x.clone()))
}

/// Changes the values of an f32 tensor, in place if the backend allows it.
fn map_floats<B: Backend>(x: FloatTensor<B>, change: impl FnOnce(&mut [f32])) -> FloatTensor<B> {
    #[cfg(feature = "flex")]
    let mut x = x;
    #[cfg(feature = "flex")]
    if let Some(in_place) = (&mut x as &mut dyn core::any::Any).downcast_mut::<burn_flex::FlexTensor>()
        && let Some((start, end)) = in_place.layout().contiguous_offsets()
    {
        change(&mut in_place.storage_mut::<f32>()[start..end]);
        return x;
    }
    let (shape, device) = (x.shape(), B::float_device(&x));
    let mut values = read_f32::<B>(x);
    change(&mut values);
    B::float_from_data(TensorData::new(values, shape), &device)
}

/// `[rows, cols]` of a tensor as a matrix.
pub(crate) fn matrix(shape: &Shape) -> [usize; 2] {
    let cols = shape[shape.num_dims() - 1];
    [shape.num_elements() / cols, cols]
}

/// Decoded values in memory order. Only block scales are applied.
fn values<D>(operand: &HostOperand<D>) -> Vec<f32> {
    let HostOperand { codes, format, inv_scales, .. } = operand;
    match operand.block() {
        Some(size) => loops::dequantize(codes, operand.dims[1], *format, size, &inv_scales.values()),
        None => loops::decode(codes, *format),
    }
}

/// A tensor of decoded values: `[rows, k]`, or `[k, rows]` if `transpose`.
fn stored<B: Backend>(operand: &HostOperand<Device<B>>, values: Vec<f32>, transpose: bool) -> FloatTensor<B> {
    let stored = B::float_from_data(TensorData::new(values, operand.dims), &operand.device);
    if operand.transposed == transpose { stored } else { B::float_transpose(stored) }
}
