//! The host path: a tensor is read back, cast by the scalar reference, decoded and multiplied by the backend's own f32
//! matmul. It serves CPU backends, where reading back is free or a copy.
use std::sync::Arc;

use burn_backend::tensor::{Device, FloatTensor};
use burn_backend::{Backend, DType, FloatDType, Scalar, TensorData, TensorMetadata};
use burn_std::Shape;
use float8_kernels::{Cast, Format, InvScale, Orientation, Scale, reference};

use crate::backend::{Copies, HostCodes};

/// FP8 codes in host memory.
///
/// One scale per tensor is the same in both orientations, so both share the codes.
#[derive(Clone)]
pub struct HostOperand<D> {
    device: D,
    /// Row-major `[dims[0], dims[1]]`.
    codes: Arc<Vec<u8>>,
    dims: [usize; 2],
    /// Whether the operand is the transpose of `codes`.
    transposed: bool,
    inv_scale: InvScale,
    format: Format,
}

impl<D> core::fmt::Debug for HostOperand<D> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        let Self { dims, transposed, inv_scale, format, .. } = self;
        write!(f, "HostOperand {{ {format:?} {dims:?}, transposed: {transposed}, {inv_scale:?} }}")
    }
}

/// Whether the host path can cast a tensor of this dtype.
pub fn supports(dtype: DType) -> bool {
    matches!(dtype, DType::F32 | DType::F16 | DType::BF16)
}

/// [`Float8Backend::fp8_quantize`](crate::Float8Backend::fp8_quantize) on the host.
pub fn quantize<B: Backend>(x: FloatTensor<B>, cast: Cast, orientation: Orientation) -> Copies<HostOperand<Device<B>>> {
    let device = B::float_device(&x);
    let shape = x.shape();
    let cols = shape[shape.num_dims() - 1];
    let rows = shape.num_elements() / cols;
    let data = burn_std::future::block_on(B::float_into_data(x)).expect("a tensor on the host can be read");
    let (codes, scale) = encode(data, cast);
    let operand = |transposed, codes| HostOperand {
        device: device.clone(),
        codes,
        dims: [rows, cols],
        transposed,
        inv_scale: scale.inverse(),
        format: cast.format,
    };
    let codes = Arc::new(codes);
    Copies {
        rows: orientation.rows().then(|| operand(false, codes.clone())),
        cols: orientation.cols().then(|| operand(true, codes.clone())),
    }
}

/// [`Float8Backend::fp8_matmul`](crate::Float8Backend::fp8_matmul) on the host, with `B`'s f32 matmul.
pub fn matmul<B: Backend>(
    a: &HostOperand<Device<B>>,
    b: &HostOperand<Device<B>>,
    bias: Option<FloatTensor<B>>,
    shape: Shape,
    dtype: FloatDType,
) -> FloatTensor<B> {
    let y = B::float_matmul(decode::<B>(a, false), decode::<B>(b, true));
    let y = B::float_mul_scalar(y, Scalar::from(a.inv_scale.get() * b.inv_scale.get()));
    let y = match bias {
        Some(bias) => {
            let n = bias.shape().num_elements();
            let bias = B::float_reshape(bias, Shape::from(vec![1, n]));
            B::float_add(y, to_dtype::<B>(bias, FloatDType::F32))
        }
        None => y,
    };
    to_dtype::<B>(B::float_reshape(y, shape), dtype)
}

/// [`Float8Backend::fp8_read`](crate::Float8Backend::fp8_read) on the host.
pub fn read<D>(operand: &HostOperand<D>) -> HostCodes {
    let [rows, cols] = operand.dims;
    let (codes, dims) = if operand.transposed {
        let stored = &operand.codes;
        ((0..cols).flat_map(|c| (0..rows).map(move |r| stored[r * cols + c])).collect(), [cols, rows])
    } else {
        (operand.codes.to_vec(), operand.dims)
    };
    HostCodes { codes, dims, format: operand.format, inv_scale: operand.inv_scale }
}

fn to_dtype<B: Backend>(x: FloatTensor<B>, dtype: FloatDType) -> FloatTensor<B> {
    if x.dtype() == DType::from(dtype) { x } else { B::float_cast(x, dtype) }
}

/// The exact values of the codes, unscaled: `[rows, k]`, or `[k, rows]` if `transpose`.
fn decode<B: Backend>(operand: &HostOperand<Device<B>>, transpose: bool) -> FloatTensor<B> {
    let values = TensorData::new(values(&operand.codes, operand.format), operand.dims);
    let stored = B::float_from_data(values, &operand.device);
    if operand.transposed == transpose { stored } else { B::float_transpose(stored) }
}

// The loops over elements are not generic, so that they are optimized here and not as the user's crate is.

/// The codes of a tensor, and the scale from its own amax.
fn encode(data: TensorData, cast: Cast) -> (Vec<u8>, Scale) {
    let data = data.convert::<f32>();
    let values = data.as_slice::<f32>().expect("converted to f32");
    let scale = reference::amax_to_scale(reference::amax(values), cast.format, cast.scale_mode);
    let mut codes = vec![0; values.len()];
    reference::cast(values, scale, cast.format, &mut codes);
    (codes, scale)
}

/// The exact values of codes, unscaled.
fn values(codes: &[u8], format: Format) -> Vec<f32> {
    codes.iter().map(|code| reference::decode(*code, format)).collect()
}

/// Implements [`Float8Backend`](crate::Float8Backend) for a backend by the host path.
///
/// ```text
/// burn_float8::host_backend!(MyCpuBackend);
/// ```
#[macro_export]
macro_rules! host_backend {
    ($backend:ty) => {
        impl $crate::Float8Backend for $backend {
            type Operand = $crate::host::HostOperand<$crate::__private::Device<Self>>;

            fn fp8_supports(_: &$crate::__private::Device<Self>, dtype: $crate::__private::DType) -> bool {
                $crate::host::supports(dtype)
            }

            fn fp8_gemm_path(_: &$crate::__private::Device<Self>) -> $crate::GemmPath {
                $crate::GemmPath::Host
            }

            fn fp8_quantize(
                x: $crate::__private::FloatTensor<Self>,
                cast: $crate::Cast,
                orientation: $crate::Orientation,
            ) -> $crate::Copies<Self::Operand> {
                $crate::host::quantize::<Self>(x, cast, orientation)
            }

            fn fp8_matmul(
                a: &Self::Operand,
                b: &Self::Operand,
                bias: Option<$crate::__private::FloatTensor<Self>>,
                shape: $crate::__private::Shape,
                dtype: $crate::__private::FloatDType,
            ) -> $crate::__private::FloatTensor<Self> {
                $crate::host::matmul::<Self>(a, b, bias, shape, dtype)
            }

            fn fp8_read(operand: &Self::Operand) -> $crate::HostCodes {
                $crate::host::read(operand)
            }
        }
    };
}

#[cfg(feature = "flex")]
host_backend!(burn_flex::Flex);
