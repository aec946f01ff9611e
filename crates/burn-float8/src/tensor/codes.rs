//! [`Codes`]: an FP8-only weight, without a high-precision copy.
use std::ops::Range;
use std::sync::Arc;

use burn_backend::DType;
use burn_backend::tensor::{Device, FloatTensor};
use float8_kernels::{Cast, Format, Granularity, InvScale, ScaleMode};

use super::cache::{CastResult, Fp8Copy};
use crate::backend::host::read_f32;
use crate::backend::{Float8Backend, HostCodes, in_dtype};
use crate::terms::ContractionAxis;

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

    /// Codes of these rows and columns of the weight `[K, N]`, with zeros below up to `len` rows. Keeps the
    /// whole weight's scales. Codes pass through the host.
    ///
    /// # Panics
    ///
    /// If the part begins or ends inside of a block of scales.
    pub(crate) fn part(&self, name: &str, rows: Range<usize>, cols: Range<usize>, len: usize) -> Arc<Self> {
        let HostCodes { codes, dims: [n, k], inv_scales, granularity, .. } = self.read();
        let ([down, across], [of_cols, of_rows]) = (granularity.scale_dims(n, k), part_alignment(granularity, [n, k]));
        // Scales of a range; all, if one serves the axis.
        let scales = |range: &Range<usize>, block: usize, count: usize, end: usize| {
            let is_whole = |at: usize| at.is_multiple_of(block) || at == end;
            assert!(
                is_whole(range.start) && is_whole(range.end),
                "{name}: a rank's part {range:?} of {end} begins or ends inside of a block of {block} of its FP8-only codes"
            );
            if count == 1 { 0..1 } else { range.start.div_ceil(block)..range.end.div_ceil(block) }
        };
        let dims = [cols.len(), len];
        let own_scales = [scales(&cols, of_cols, down, n), scales(&rows, of_rows, across, k)];
        let [_, own_across] = granularity.scale_dims(dims[0], len);
        let operand = HostCodes {
            codes: block(&codes, k, [cols, rows], len, 0),
            dims,
            format: self.format,
            granularity,
            inv_scales: block(&inv_scales, across, own_scales, own_across, InvScale::new(1.0)),
            transposed: true,
        };
        let (operand, amax) = (B::fp8_write(operand, &B::float_device(&self.amax)), self.amax.clone());
        Arc::new(Self { operand, amax, ..*self })
    }

    /// Format, granularity and largest amax.
    pub(crate) fn describe(&self) -> String {
        let amax = read_f32::<B>(self.amax.clone()).into_iter().fold(0.0, f32::max);
        format!("FP8-only, {} {}, amax {amax}", self.format, self.granularity)
    }

    /// Operand of a cast along an axis; None if these codes differ from that cast.
    pub(super) fn operand_of(&self, cast: Cast, axis: ContractionAxis) -> Option<B::Operand> {
        self.serves(cast, axis).then(|| match axis {
            ContractionAxis::Leading => self.operand.clone(),
            ContractionAxis::Last => B::fp8_transpose(&self.operand),
        })
    }

    /// Whether a GEMM reads these codes, or their transpose, as its operand of a cast.
    pub(super) fn serves(&self, cast: Cast, axis: ContractionAxis) -> bool {
        let is_cast = (cast.format, cast.granularity) == (self.format, self.granularity);
        is_cast && (axis == ContractionAxis::Leading || self.serves_both(cast))
    }

    /// Result of a cast that these codes serve.
    pub(super) fn result(&self) -> Arc<CastResult<B>> {
        Arc::new(CastResult { scaling: self.amax.clone(), observed: None, observation: None })
    }

    /// Whether the transposed codes and scales equal this cast of the transpose.
    fn serves_both(&self, cast: Cast) -> bool {
        match self.granularity {
            Granularity::Tensor | Granularity::Block128x128 => true,
            Granularity::Block1x32 => self.is_square && matches!(cast.scale_mode, ScaleMode::E8m0Square(_)),
            Granularity::Row | Granularity::Block1x128 => false,
        }
    }
}

/// Multiples at which a part of codes `[N, K]` begins and ends along each axis: whole blocks of scales, or 1
/// if one scale serves the axis.
pub fn part_alignment(granularity: Granularity, [n, k]: [usize; 2]) -> [usize; 2] {
    let (groups, counts) = (granularity.group(n, k), granularity.scale_dims(n, k));
    [0, 1].map(|axis| if counts[axis] == 1 { 1 } else { groups[axis] })
}

/// Rows and columns of a matrix `[.., width]`, with `fill` after each row up to `len` columns.
fn block<T: Copy>(all: &[T], width: usize, [rows, cols]: [Range<usize>; 2], len: usize, fill: T) -> Vec<T> {
    let padding = len - cols.len();
    let row = |row: usize| &all[row * width + cols.start..row * width + cols.end];
    rows.flat_map(|at| row(at).iter().copied().chain(std::iter::repeat_n(fill, padding))).collect()
}
