//! The cast of MX in squares of 32 by 32 on a device, of the casts that it has kernels for.
//!
//! ```text
//! bytes [R, C/32]     of the cast by 1x32, in whose order a larger amax never has a smaller byte
//! square (r, c)       the largest byte of its 32 rows
//! codes               cast with the scale 1 of x · 2^(127 - byte), which is exact, in each orientation
//! ```
use burn_backend::tensor::FloatTensor;
use burn_backend::{DType, FloatDType, IntDType, Slice, TensorData, TensorMetadata};
use burn_std::Shape;
use float8_kernels::{Cast, Granularity, InvScale, Orientation, ScaleCalculationMode, ScaleMode};

use super::codes::{MX_BLOCK, repeat, scale_bytes, scale_tiles};
use super::host::matrix;
use super::operand::DeviceOperand;
use super::{Float8Backend, Quantized, ScaleFrom, in_dtype};

pub(super) fn quantize<B>(
    x: FloatTensor<B>,
    cast: Cast,
    mode: ScaleCalculationMode,
    orientation: Orientation,
) -> Quantized<B>
where
    B: Float8Backend<Operand = DeviceOperand<B>, IntTensorPrimitive = FloatTensor<B>>,
{
    let ([rows, cols], device, format) = (matrix(&x.shape()), B::float_device(&x), cast.format);
    let by_blocks = Cast { scale_mode: ScaleMode::E8m0(mode), ..cast };
    let Quantized { rows: found, amax, .. } =
        B::fp8_quantize(x.clone(), by_blocks, Orientation::Rows, ScaleFrom::Dynamic);
    let found = found.expect("the orientation that was asked for");
    let [bands, blocks] = [rows, cols].map(|len| len.div_ceil(MX_BLOCK));
    let padding = bands * MX_BLOCK - rows;
    let bytes = B::int_reshape(scale_bytes::<B>(found.inv_scale, [rows, blocks]), Shape::from(vec![rows, blocks]));
    let bytes = match padding {
        0 => bytes,
        _ => {
            let zeros = B::int_zeros(Shape::from(vec![padding, blocks]), &device, IntDType::I32);
            B::int_cat(vec![bytes, zeros], 0)
        }
    };
    let bytes = B::int_max_dim(B::int_reshape(bytes, Shape::from(vec![bands, MX_BLOCK, blocks])), 1);
    let squares = B::int_reshape(bytes, Shape::from(vec![bands, blocks]));
    // For each element of x, that of its square.
    let table: Vec<f32> = (0..=255).map(|byte| 1.0 / InvScale::from_e8m0(byte).get()).collect();
    let table = B::float_from_data(TensorData::new(table, [256]), &device);
    let of_rows = repeat::<B>(squares.clone(), [bands, blocks], rows);
    let scales = B::float_reshape(B::float_select(table, 0, of_rows.clone()), Shape::from(vec![rows, blocks, 1]));
    let scales = B::float_expand(scales, Shape::from(vec![rows, blocks, MX_BLOCK]));
    let scales = B::float_reshape(scales, Shape::from(vec![rows, blocks * MX_BLOCK]));
    let scales = B::float_slice(scales, &[Slice::full(), Slice::from(0..cols)]);
    let scaled = B::float_mul(B::float_reshape(in_dtype::<B>(x, DType::F32), Shape::from(vec![rows, cols])), scales);
    let one = B::float_full(Shape::from(vec![1]), format.max().into(), &device, FloatDType::F32);
    let codes = Cast { format, granularity: Granularity::Tensor, scale_mode: ScaleMode::F32 };
    let codes = B::fp8_quantize(scaled, codes, orientation, ScaleFrom::Amax { amax: one, observe: false });
    let operand = |codes: DeviceOperand<B>, inv_scale| DeviceOperand {
        inv_scale,
        granularity: Granularity::Block1x32,
        power_of_two: true,
        ..codes
    };
    let of_cols = B::int_transpose(squares);
    Quantized {
        rows: codes.rows.map(|codes| operand(codes, scale_tiles::<B>(of_rows, [rows, blocks]))),
        cols: codes.cols.map(|codes| {
            let bytes = repeat::<B>(of_cols, [blocks, bands], cols);
            operand(codes, scale_tiles::<B>(bytes, [cols, bands]))
        }),
        amax,
    }
}
