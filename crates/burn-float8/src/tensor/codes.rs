//! [`Codes`]: a weight that is its FP8 codes, without a high-precision copy.
//!
//! | a GEMM reads | what it gets | held |
//! | --- | --- | --- |
//! | wᵀ `[N, K]` in the cast of the codes | the codes | by the weight |
//! | w `[K, N]`, where one scale serves both orientations | their transpose | by the GEMM |
//! | anything else | a cast of the decoded values | by the GEMM |
use std::sync::Arc;

use burn_backend::DType;
use burn_backend::tensor::{Device, FloatTensor};
use float8_kernels::{Cast, Format, Granularity, InvScale, Orientation, ScaleMode};

use super::cache::{CastResult, CopyKey, Fp8Copy, Held};
use super::cast::{CastRequest, View};
use super::wrapped::Float8Tensor;
use crate::backend::{Float8Backend, HostCodes, Quantized, ScaleFrom, in_dtype};
use crate::terms::ContractionAxis;

/// See the module.
pub(crate) struct Codes<B: Float8Backend> {
    /// `[N, K]`
    operand: B::Operand,
    format: Format,
    granularity: Granularity,
    /// Whether scales of blocks of 32 are equal in squares of 32 by 32.
    is_square: bool,
    /// `[1]` or more, of which the largest gives the smallest scale: for the report.
    amax: FloatTensor<B>,
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
        let HostCodes { format, granularity, dims: [rows, k], .. } = codes;
        let [_, blocks] = granularity.scale_dims(rows, k);
        let are_equal = |band: &[InvScale]| band.chunks(blocks).all(|row| row == &band[..blocks]);
        let is_square = granularity == Granularity::Block1x32 && codes.inv_scales.chunks(32 * blocks).all(are_equal);
        let operand = B::fp8_write(codes, &B::float_device(&amax));
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
    fn serves_both(&self, cast: Cast) -> bool {
        match self.granularity {
            Granularity::Tensor | Granularity::Block128x128 => true,
            Granularity::Block1x32 => self.is_square && matches!(cast.scale_mode, ScaleMode::E8m0Square(_)),
            Granularity::Row | Granularity::Block1x128 => false,
        }
    }
}

/// The copy of a weight of codes alone that a GEMM reads.
pub(super) fn copy_of_codes<B: Float8Backend>(
    t: &Float8Tensor<B>,
    codes: &Arc<Codes<B>>,
    view: View<'_, B>,
    request: CastRequest<'_>,
) -> Arc<Fp8Copy<B>> {
    let CastRequest { operand, layer, .. } = request;
    let key = CopyKey { cast: request.key(), layout: view.layout(), operand };
    let mut entries = t.cache().lock();
    if let Some(copy) = entries.find(key) {
        return copy;
    }
    let cast = key.cast.cast;
    let is_cast = (cast.format, cast.granularity) == (codes.format, codes.granularity);
    let result = || Arc::new(CastResult { scaling: codes.amax.clone(), observed: None, observation: None });
    let copy = |made, result| Fp8Copy::new(made, cast, result, layer);
    match operand.axis {
        ContractionAxis::Leading if is_cast => {
            let copy = copy(codes.operand.clone(), result());
            entries.copies.push((key, Held::Strong(copy.clone())));
            copy
        }
        axis => {
            // Not under the lock: casts run in a pool whose threads may take up other forwards.
            drop(entries);
            let copy = match axis {
                ContractionAxis::Last if is_cast && codes.serves_both(cast) => {
                    copy(B::fp8_transpose(&codes.operand), result())
                }
                axis => {
                    let values = view.of(t);
                    layer.count_cast(operand.role);
                    let orientation: Orientation = axis.orientation();
                    let Quantized { rows, cols, amax } = B::fp8_quantize(values, cast, orientation, ScaleFrom::Dynamic);
                    let made = rows.or(cols).expect("the orientation that is asked for");
                    copy(made, Arc::new(CastResult { scaling: amax.clone(), observed: Some(amax), observation: None }))
                }
            };
            t.cache().lock().copies.push((key, Held::Weak(Arc::downgrade(&copy))));
            copy
        }
    }
}
