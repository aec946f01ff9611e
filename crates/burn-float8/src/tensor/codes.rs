//! [`Codes`]: an FP8-only weight, without a high-precision copy.
use std::sync::Arc;

use burn_backend::DType;
use burn_backend::tensor::{Device, FloatTensor};
use float8_kernels::{Cast, Format, Granularity, ScaleMode};

use super::cache::Fp8Copy;
use crate::backend::{Float8Backend, HostCodes, in_dtype};

/// Codes of a weight; see the module.
pub(crate) struct Codes<B: Float8Backend> {
    /// `[N, K]`
    pub(super) operand: B::Operand,
    pub(crate) format: Format,
    pub(crate) granularity: Granularity,
    /// Whether block-of-32 scales are equal in squares of 32 by 32.
    is_square: bool,
    /// Amax of one or more values, for the report. The largest gives the smallest scale.
    pub(super) amax: FloatTensor<B>,
}

impl<B: Float8Backend> core::fmt::Debug for Codes<B> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "Codes {{ {} {} }}", self.format, self.granularity)
    }
}

impl<B: Float8Backend> Codes<B> {
    /// Codes of a weight's copy `[N, K]`.
    pub(crate) fn of(copy: &Fp8Copy<B>) -> Arc<Self> {
        let Cast { format, granularity, scale_mode } = copy.cast;
        let is_square = matches!(scale_mode, ScaleMode::E8m0Square(_));
        Arc::new(Self {
            operand: copy.operand.clone(),
            format,
            granularity,
            is_square,
            amax: copy.result.scaling.clone(),
        })
    }

    /// Uploads existing codes `[N, K]` to the device of `amax`, the amax of their values.
    pub(crate) fn new(codes: HostCodes, amax: FloatTensor<B>) -> Arc<Self> {
        let HostCodes { format, granularity, .. } = codes;
        let is_square = codes.is_square();
        // A host stores them as [K, N], like a weight cast there: the same order of sums, and the
        // fast layout of its GEMV.
        let operand = B::fp8_write(HostCodes { transposed: true, ..codes }, &B::float_device(&amax));
        Arc::new(Self { operand, format, granularity, is_square, amax })
    }

    /// The same codes on another device.
    pub(crate) fn to_device(&self, device: &Device<B>) -> Arc<Self> {
        Self::new(self.read(), B::float_to_device(self.amax.clone(), device))
    }

    /// Reads the codes to the host.
    pub(crate) fn read(&self) -> HostCodes {
        B::fp8_read(&self.operand)
    }

    /// Bytes of codes and scales.
    pub(crate) fn bytes(&self) -> u64 {
        B::fp8_size(&self.operand).bytes
    }

    /// Values `[K, N]` in a dtype.
    pub(crate) fn values(&self, dtype: DType) -> FloatTensor<B> {
        in_dtype::<B>(B::float_transpose(B::fp8_dequantize(&self.operand)), dtype)
    }

    /// Whether the transposed codes and scales equal this cast of the transpose.
    pub(super) fn serves_both(&self, cast: Cast) -> bool {
        match self.granularity {
            Granularity::Tensor | Granularity::Block128x128 => true,
            Granularity::Block1x32 => self.is_square && matches!(cast.scale_mode, ScaleMode::E8m0Square(_)),
            Granularity::Row | Granularity::Block1x128 => false,
        }
    }
}
