//! Codes in host memory: their values, their transpose, and casts of values without a tensor.
use std::sync::Arc;

use burn_backend::tensor::{Device, FloatTensor};
use burn_backend::{Backend, TensorData};
use float8_kernels::{Cast, Granularity, InvScale, reference};

use super::{HostOperand, loops};
use crate::backend::HostCodes;

/// `fp8_dequantize` on the host.
pub(super) fn dequantize<B: Backend>(operand: &HostOperand<Device<B>>) -> FloatTensor<B> {
    let HostOperand { device, codes, dims, transposed, inv_scales, format, .. } = operand;
    let values = loops::dequantize(codes, dims[1], *format, operand.group(), &inv_scales.values());
    let values = B::float_from_data(TensorData::new(values, *dims), device);
    if *transposed { B::float_transpose(values) } else { values }
}

/// `fp8_transpose` on the host. The codes are shared, not moved.
pub(super) fn transpose_operand<D: Clone>(operand: &HostOperand<D>) -> HostOperand<D> {
    let transposed = HostOperand { transposed: !operand.transposed, ..operand.clone() };
    if operand.granularity != Granularity::Block1x32 {
        return transposed;
    }
    // In a square, one scale per row of the codes becomes one per column.
    let ([_, width], [rows, cols]) = (operand.scale_dims(), transposed.scale_dims());
    let [height, length] = operand.group();
    let [step_down, step_right] = transposed.group();
    let place = |row: usize, col: usize| row * step_down / height * width + col * step_right / length;
    let inv_scales = operand.inv_scales.at((0..rows).flat_map(|row| (0..cols).map(move |col| place(row, col))));
    HostOperand { inv_scales: Arc::new(inv_scales), ..transposed }
}

/// Max |x|. NaN if `values` contain a NaN, 0 if they are empty.
pub fn amax(values: &[f32]) -> f32 {
    loops::amax(values)
}

/// Inverse scale of a cast with one scale from this amax.
pub fn inv_scale(amax: f32, cast: Cast) -> InvScale {
    reference::amax_to_scale(amax, cast.format, cast.scale_mode).inverse()
}

impl HostCodes {
    /// Casts `values`, row-major `dims` = `[rows, k]` with the contraction last. The result equals
    /// [`Float8Backend::fp8_quantize`] on every device. An amax sets the single scale of
    /// [`Granularity::Tensor`]; values beyond the format saturate.
    ///
    /// [`Float8Backend::fp8_quantize`]: crate::backend::Float8Backend::fp8_quantize
    ///
    /// # Panics
    /// If there are not `rows · k` values, or an amax is given with a granularity of several
    /// scales.
    pub fn quantize(values: &[f32], dims: [usize; 2], cast: Cast, amax: Option<f32>) -> Self {
        let Cast { format, granularity, scale_mode } = cast;
        assert_eq!(values.len(), dims[0] * dims[1], "HostCodes::quantize: the values are not {dims:?}");
        let (codes, scales) = match amax {
            Some(amax) => {
                assert_eq!(granularity, Granularity::Tensor, "HostCodes::quantize: one amax is for one scale");
                let scale = reference::amax_to_scale(amax, format, scale_mode);
                (loops::encode(values, scale, format), vec![scale])
            }
            None => {
                let (codes, scales, _) = loops::quantize(values, dims, cast, false);
                (codes, scales)
            }
        };
        let inv_scales = scales.iter().map(|scale| scale.inverse()).collect();
        Self { codes, dims, format, granularity, inv_scales, transposed: false }
    }

    /// `decode(code) · inv_scale`, each rounded once to f32, row-major `dims`.
    ///
    /// # Panics
    /// If the numbers of codes and scales do not match `dims` and the granularity.
    pub fn dequantize(&self) -> Vec<f32> {
        let [rows, k] = self.dims;
        let [height, width] = self.granularity.scale_dims(rows, k);
        assert_eq!(self.codes.len(), rows * k, "HostCodes::dequantize: the codes are not {:?}", self.dims);
        assert_eq!(
            self.inv_scales.len(),
            height * width,
            "HostCodes::dequantize: the scales are not [{height}, {width}]"
        );
        let size = self.granularity.group(rows, k);
        loops::dequantize(&self.codes, k, self.format, size, &self.inv_scales)
    }

    /// Whether the scales are blocks of 32 that are equal in squares of 32 by 32. The transposed
    /// codes are then a valid cast too.
    ///
    /// # Panics
    /// If there are fewer scales than `dims` and the granularity require.
    pub fn is_square(&self) -> bool {
        let [height, blocks] = self.granularity.scale_dims(self.dims[0], self.dims[1]);
        let are_equal = |band: &[InvScale]| band.chunks(blocks).all(|row| row == &band[..blocks]);
        self.granularity == Granularity::Block1x32
            && self.inv_scales[..height * blocks].chunks(32 * blocks).all(are_equal)
    }

    /// Index of the first scale that is 0 for a nonzero code. A group of zeros may have the scale
    /// 0.
    ///
    /// # Panics
    /// If there are fewer codes or scales than `dims` and the granularity require.
    pub fn zero_scale(&self) -> Option<usize> {
        if self.inv_scales.iter().all(|scale| scale.get() != 0.0) {
            return None;
        }
        let mut scaled = self.scale_indices().filter(|(i, _)| self.codes[*i] & 0x7f != 0).map(|(_, index)| index);
        scaled.find(|index| self.inv_scales[*index].get() == 0.0)
    }

    /// Index of each code, and index of its scale.
    fn scale_indices(&self) -> impl Iterator<Item = (usize, usize)> {
        let [rows, k] = self.dims;
        let ([height, width], [_, blocks]) = (self.granularity.group(rows, k), self.granularity.scale_dims(rows, k));
        (0..rows * k).map(move |i| (i, i / k / height * blocks + i % k / width))
    }

    /// Row-major index and scale of the first code that is finite but overflows f32 with its scale.
    /// An example is code 448 with E8M0 byte 254, 2^127.
    ///
    /// # Panics
    /// If there are fewer codes or scales than `dims` and the granularity require.
    pub fn overflow(&self) -> Option<(usize, InvScale)> {
        let largest = self.inv_scales.iter().fold(0.0, |largest: f32, scale| largest.max(scale.get()));
        if (largest * self.format.max()).is_finite() {
            return None;
        }
        self.scale_indices().find_map(|(i, index)| {
            let (scale, value) = (self.inv_scales[index], reference::decode(self.codes[i], self.format));
            (value.is_finite() && !(value * scale.get()).is_finite()).then_some((i, scale))
        })
    }
}
