//! [`HostBackend`]: the host path as a [`Float8Backend`], for every CPU backend.
use burn_backend::Backend;
use burn_backend::tensor::{Device, FloatTensor};
use float8_kernels::{Cast, Orientation};

use super::{HostOperand, gemv};
use crate::backend::{
    AdamWDtypes, AdamWFn, CachedAttention, DeviceFacts, Float8Backend, Fused, FusedBackward, GemmRequest, GivenAmax,
    HostCodes, OperandSize, Quantized,
};

/// A CPU backend that computes FP8 on the host path. [`host_backend!`](crate::host_backend)
/// implements it.
#[diagnostic::on_unimplemented(
    message = "`{Self}` does not compute in FP8",
    note = "`Float8` wraps a backend once: write `Float8<B>` in place of `Float8<Float8<B>>`"
)]
pub trait HostBackend: Backend {}

/// Implements [`HostBackend`](crate::backend::host::HostBackend) for your CPU backend. `Flex` and
/// `NdArray` implement it already.
///
/// ```text
/// burn_float8::host_backend!(MyCpuBackend);
/// ```
#[macro_export]
macro_rules! host_backend {
    ($backend:ty) => {
        impl $crate::backend::host::HostBackend for $backend {}
    };
}

#[cfg(feature = "flex")]
host_backend!(burn_flex::Flex);
#[cfg(feature = "ndarray")]
host_backend!(burn_ndarray::NdArray);

impl<B: HostBackend> Float8Backend for B {
    type Operand = HostOperand<Device<B>>;

    /// GEMMs of up to `MAX_ROWS` rows compute each row independently.
    fn fp8_facts(device: &Device<B>) -> DeviceFacts {
        let facts = DeviceFacts::new(|dtype| B::supports_dtype(device, dtype));
        DeviceFacts { independent_rows: gemv::MAX_ROWS, attention: "tiles", ..facts }
    }

    fn fp8_quantize(
        x: FloatTensor<B>,
        cast: Cast,
        orientation: Orientation,
        given: Option<GivenAmax<FloatTensor<B>>>,
    ) -> Quantized<B> {
        let ([rows, cols], amax) = super::quantize::<B>(x, cast, orientation, given);
        Quantized { rows, cols, amax }
    }

    fn fp8_matmul(gemm: GemmRequest<'_, B>) -> FloatTensor<B> {
        let GemmRequest { a, b, bias, groups, shape, dtype, .. } = gemm;
        super::matmul::<B>([a, b], bias, groups, shape, dtype)
    }

    fn fp8_health(x: FloatTensor<B>, operand: &Self::Operand, transposed: bool) -> FloatTensor<B> {
        super::health::<B>(x, operand, transposed)
    }

    fn fused(op: &Fused<B>, inputs: &[FloatTensor<B>], backward: Option<&FusedBackward<'_, B>>) -> Vec<FloatTensor<B>> {
        super::fused::compute(op, inputs, backward)
    }

    fn cached_attention(attention: &CachedAttention<B>) -> Option<FloatTensor<B>> {
        Some(super::attention::cached(attention))
    }

    fn adamw(_device: &Device<B>, _dtypes: AdamWDtypes) -> Option<AdamWFn<B>> {
        Some(super::adamw::adamw::<B>)
    }

    /// Rows have no padding.
    fn fp8_size(operand: &Self::Operand) -> OperandSize {
        let [rows, k] = operand.matrix();
        let bytes = operand.codes.len() as u64 + operand.inv_scales.bytes();
        OperandSize { rows, k, padded_k: k, bytes }
    }

    fn fp8_dequantize(operand: &Self::Operand) -> FloatTensor<B> {
        super::codes::dequantize::<B>(operand)
    }

    fn fp8_transpose(operand: &Self::Operand) -> Self::Operand {
        super::codes::transpose_operand(operand)
    }

    fn fp8_read(operand: &Self::Operand) -> HostCodes {
        super::read_codes(operand)
    }

    fn fp8_write(codes: HostCodes, device: &Device<B>) -> Self::Operand {
        super::write_codes(codes, device)
    }
}
