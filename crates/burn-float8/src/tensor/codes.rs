//! [`Codes`]: a weight that is its FP8 codes, without a high-precision copy.
use std::sync::Arc;

use burn_backend::DType;
use burn_backend::tensor::{Device, FloatTensor};
use float8_kernels::{Cast, Format, Granularity, ScaleMode};

use super::cache::Fp8Copy;
use crate::backend::{Float8Backend, HostCodes, in_dtype};

/// See the module.
pub(crate) struct Codes<B: Float8Backend> {
    /// `[N, K]`
    pub(super) operand: B::Operand,
    pub(super) format: Format,
    pub(super) granularity: Granularity,
    /// Whether scales of blocks of 32 are equal in squares of 32 by 32.
    is_square: bool,
    /// `[1]` or more, of which the largest gives the smallest scale: for the report.
    pub(super) amax: FloatTensor<B>,
}

impl<B: Float8Backend> core::fmt::Debug for Codes<B> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "Codes {{ {} {} }}", self.format, self.granularity)
    }
}

impl<B: Float8Backend> Codes<B> {
    /// What a copy of a weight `[N, K]` holds.
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

    /// Codes `[N, K]` that are there already, on a device, and the amax of what they stand for.
    pub(crate) fn new(codes: HostCodes, amax: FloatTensor<B>) -> Arc<Self> {
        let HostCodes { format, granularity, .. } = codes;
        let is_square = codes.is_square();
        // On a host they lie [K, N], as those of a weight that was cast there: the same order of sums, and the layout that its GEMV is fast with.
        let operand = B::fp8_write(HostCodes { transposed: true, ..codes }, &B::float_device(&amax));
        Arc::new(Self { operand, format, granularity, is_square, amax })
    }

    /// The same codes on another device.
    pub(crate) fn to_device(&self, device: &Device<B>) -> Arc<Self> {
        Self::new(self.read(), B::float_to_device(self.amax.clone(), device))
    }

    /// The codes on the host.
    pub(crate) fn read(&self) -> HostCodes {
        B::fp8_read(&self.operand)
    }

    pub(crate) fn format(&self) -> Format {
        self.format
    }

    pub(crate) fn granularity(&self) -> Granularity {
        self.granularity
    }

    /// Bytes of codes and scales.
    pub(crate) fn bytes(&self) -> u64 {
        B::fp8_size(&self.operand).bytes
    }

    /// The values `[K, N]` in a dtype.
    pub(crate) fn values(&self, dtype: DType) -> FloatTensor<B> {
        in_dtype::<B>(B::float_transpose(B::fp8_dequantize(&self.operand)), dtype)
    }

    /// Whether the same codes and scales, transposed, are this cast of the transpose.
    pub(super) fn serves_both(&self, cast: Cast) -> bool {
        match self.granularity {
            Granularity::Tensor | Granularity::Block128x128 => true,
            Granularity::Block1x32 => self.is_square && matches!(cast.scale_mode, ScaleMode::E8m0Square(_)),
            Granularity::Row | Granularity::Block1x128 => false,
        }
    }
}
