//! [`DeviceOperand`]: an operand in tensors of a CubeCL backend, and its layout.
use burn_backend::tensor::{FloatTensor, IntTensor};
use burn_backend::{Backend, DType, TensorMetadata};
use burn_cubecl::CubeRuntime;
use burn_cubecl::tensor::CubeTensor;
use burn_std::Shape;
use cubecl::client::ComputeClient;
use cubecl::server::Handle;
use float8_kernels::{Format, Granularity, InvScale, mx};

use super::OperandSize;

/// Length, format and scales of a [`DeviceOperand`].
#[derive(Clone, Copy, Debug)]
pub struct OperandLayout {
    /// Length of the contracted axis.
    pub k: usize,
    /// Format of the codes.
    pub format: Format,
    /// Granularity of the scales.
    pub granularity: Granularity,
    /// Whether every scale is a power of two or NaN
    /// ([`Operand::power_of_two`](float8_kernels::Operand::power_of_two)).
    pub power_of_two: bool,
}

/// FP8 codes on a device.
#[derive(Clone, Debug)]
pub struct DeviceOperand<B: Backend> {
    /// `[rows, row_words(k)]` in u32: four codes per word, rows padded with zeros.
    pub codes: IntTensor<B>,
    /// `granularity.scale_dims` in f32. For `Block1x32`, E8M0 bytes in tiles
    /// ([`mx`](mod@float8_kernels::mx)), `[scale_words]` in u32. Stored in a float tensor, since
    /// only this project's kernels read it.
    pub inv_scale: FloatTensor<B>,
    /// Everything that is not in a tensor.
    pub layout: OperandLayout,
}

impl<B: Backend> DeviceOperand<B> {
    /// The tensors as inputs of an operation.
    pub(super) fn tensors(&self) -> Vec<FloatTensor<B>>
    where
        B: Backend<IntTensorPrimitive = FloatTensor<B>>,
    {
        vec![self.codes.clone(), self.inv_scale.clone()]
    }

    pub(super) fn size(&self) -> OperandSize {
        let (codes, scales) = (self.codes.shape(), self.inv_scale.shape());
        let bytes = 4 * (codes.num_elements() + scales.num_elements()) as u64;
        OperandSize { rows: codes[0], k: self.layout.k, padded_k: 4 * codes[1], bytes }
    }
}

/// Row-major scales of an operand `[rows, k]` from the bytes of its memory.
pub(super) fn read_scales(bytes: &[u8], granularity: Granularity, rows: usize, k: usize) -> Vec<InvScale> {
    let [_, blocks] = granularity.scale_dims(rows, k);
    match granularity {
        Granularity::Block1x32 => mx::from_blocked(bytes, rows, blocks).into_iter().map(InvScale::from_e8m0).collect(),
        _ => bytes.as_chunks().0.iter().map(|bytes| InvScale::new(f32::from_le_bytes(*bytes))).collect(),
    }
}

/// Shape and dtype of the scales of an operand `[rows, k]`.
pub fn scales(granularity: Granularity, rows: usize, k: usize) -> (Shape, DType) {
    match granularity {
        Granularity::Block1x32 => (Shape::from(vec![granularity.scale_words(rows, k)]), DType::U32),
        _ => (Shape::from(granularity.scale_dims(rows, k).to_vec()), DType::F32),
    }
}

/// Wraps device memory in a Burn tensor.
pub(super) fn tensor<R: CubeRuntime>(
    client: &ComputeClient<R>,
    device: &R::Device,
    handle: Handle,
    shape: impl Into<Shape>,
    dtype: DType,
) -> CubeTensor<R> {
    CubeTensor::new_contiguous(client.clone(), device.clone(), shape.into(), handle, dtype)
}
