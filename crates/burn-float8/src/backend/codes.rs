//! What is made of an operand's codes on a device by Burn's operations: the values that they stand for, and the transpose.
//!
//! Both are exact, but for values below f32's normal ones, which devices may flush.
use burn_backend::tensor::{FloatTensor, IntTensor};
use burn_backend::{Backend, IntDType, Scalar, Slice, TensorData, TensorMetadata};
use burn_std::Shape;
use float8_kernels::{Granularity, InvScale, mx, reference, row_words};

use super::operand::DeviceOperand;

/// `decode(code) · inv_scale`, f32 `[rows, k]`.
pub(super) fn dequantize<B: Backend<IntTensorPrimitive = FloatTensor<B>>>(
    operand: &DeviceOperand<B>,
) -> FloatTensor<B> {
    let DeviceOperand { codes, inv_scale, k, format, granularity, .. } = operand;
    let (rows, device) = (codes.shape()[0], B::int_device(codes));
    let table = |value: &dyn Fn(u8) -> f32| {
        let values: Vec<f32> = (0..=255).map(value).collect();
        B::float_from_data(TensorData::new(values, [256]), &device)
    };
    let values = B::float_select(table(&|code| reference::decode(code, *format)), 0, bytes::<B>(codes.clone()));
    let values = B::float_reshape(values, shape([rows, 4 * row_words(*k)]));
    let values = B::float_slice(values, &[Slice::full(), Slice::from(0..*k)]);
    let [height, width] = granularity.scale_dims(rows, *k);
    let scales = match granularity {
        Granularity::Block1x32 => {
            let scales = B::float_select(
                table(&|byte| InvScale::from_e8m0(byte).get()),
                0,
                scale_bytes::<B>(inv_scale.clone(), [height, width]),
            );
            B::float_reshape(scales, shape([height, width]))
        }
        _ => inv_scale.clone(),
    };
    B::float_mul(values, spread::<B>(scales, [height, width], granularity.group(rows, *k), [rows, *k]))
}

/// The E8M0 bytes `[rows · blocks]` of tiles.
pub(super) fn scale_bytes<B: Backend<IntTensorPrimitive = FloatTensor<B>>>(
    tiles: FloatTensor<B>,
    [rows, blocks]: [usize; 2],
) -> IntTensor<B> {
    let all: Vec<i32> = (0..4 * tiles.shape().num_elements() as i32).collect();
    let places = TensorData::new(mx::from_blocked(&all, rows, blocks), [rows * blocks]);
    let places = B::int_from_data(places, &B::int_device(&tiles));
    B::int_select(bytes::<B>(tiles), 0, places)
}

/// The tiles of E8M0 bytes `[rows · blocks]`.
pub(super) fn scale_tiles<B: Backend<IntTensorPrimitive = FloatTensor<B>>>(
    bytes: IntTensor<B>,
    [rows, blocks]: [usize; 2],
) -> FloatTensor<B> {
    let device = B::int_device(&bytes);
    // The place behind the last one holds the zero that pads.
    let from = |i: usize| i as i32 + 1;
    let tiles: Vec<i32> = mx::to_blocked(&(0..rows * blocks).map(from).collect::<Vec<_>>(), rows, blocks);
    let words = tiles.len() / 4;
    let zero = B::int_zeros(Shape::from(vec![1]), &device, IntDType::I32);
    let places = B::int_from_data(TensorData::new(tiles, [4 * words]), &device);
    let bytes = B::int_select(B::int_cat(vec![zero, bytes], 0), 0, places);
    B::int_reshape(join::<B>(B::int_reshape(bytes, shape([words, 4]))), Shape::from(vec![words]))
}

/// Each scale for all elements of its group.
fn spread<B: Backend>(
    scales: FloatTensor<B>,
    [height, width]: [usize; 2],
    group: [usize; 2],
    [rows, k]: [usize; 2],
) -> FloatTensor<B> {
    let apart = B::float_reshape(scales, Shape::from(vec![height, 1, width, 1]));
    let spread = B::float_expand(apart, Shape::from(vec![height, group[0], width, group[1]]));
    let spread = B::float_reshape(spread, shape([height * group[0], width * group[1]]));
    B::float_slice(spread, &[Slice::from(0..rows), Slice::from(0..k)])
}

/// The operand `[k, rows]` of the same codes and scales, where these are symmetric.
pub(super) fn transpose<B: Backend<IntTensorPrimitive = FloatTensor<B>>>(
    operand: &DeviceOperand<B>,
) -> DeviceOperand<B> {
    let DeviceOperand { codes, inv_scale, k, format, granularity, power_of_two } = operand.clone();
    let (rows, device) = (codes.shape()[0], B::int_device(&codes));
    let codes = B::int_reshape(bytes::<B>(codes), shape([rows, 4 * row_words(k)]));
    let codes = B::int_transpose(B::int_slice(codes, &[Slice::full(), Slice::from(0..k)]));
    let padding = 4 * row_words(rows) - rows;
    let codes = match padding {
        0 => codes,
        _ => B::int_cat(vec![codes, B::int_zeros(shape([k, padding]), &device, IntDType::I32)], 1),
    };
    let words = join::<B>(B::int_reshape(codes, shape([k * row_words(rows), 4])));
    let codes = B::int_reshape(words, shape([k, row_words(rows)]));
    let inv_scale = match granularity {
        Granularity::Block1x32 => {
            let [squares, blocks] = [rows.div_ceil(MX_BLOCK), k.div_ceil(MX_BLOCK)];
            let bytes = B::int_reshape(scale_bytes::<B>(inv_scale, [rows, blocks]), shape([rows, blocks]));
            let first: Vec<i32> = (0..squares).map(|square| (MX_BLOCK * square) as i32).collect();
            let first = B::int_from_data(TensorData::new(first, [squares]), &device);
            let of_squares = B::int_transpose(B::int_select(bytes, 0, first));
            scale_tiles::<B>(repeat::<B>(of_squares, [blocks, squares], k), [k, squares])
        }
        _ => B::float_transpose(inv_scale),
    };
    DeviceOperand { codes, inv_scale, k: rows, format, granularity, power_of_two }
}

/// Rows and columns of a square of MX scales.
pub(super) const MX_BLOCK: usize = 32;

/// Each of `[bands, width]` for the 32 rows of its band, of which there are `rows`: `[rows · width]`.
pub(super) fn repeat<B: Backend>(bands: IntTensor<B>, [height, width]: [usize; 2], rows: usize) -> IntTensor<B> {
    let bands = B::int_reshape(bands, Shape::from(vec![height, 1, width]));
    let all = B::int_expand(bands, Shape::from(vec![height, MX_BLOCK, width]));
    let all = B::int_reshape(all, shape([height * MX_BLOCK, width]));
    B::int_reshape(B::int_slice(all, &[Slice::from(0..rows), Slice::full()]), Shape::from(vec![rows * width]))
}

/// u32 words `[n, 1]` of bytes `[n, 4]`, the low one first.
fn join<B: Backend>(bytes: IntTensor<B>) -> IntTensor<B> {
    let byte = |i: usize| {
        let byte = B::int_slice(bytes.clone(), &[Slice::full(), Slice::from(i..i + 1)]);
        B::bitwise_left_shift_scalar(B::int_cast(byte, IntDType::U32), Scalar::UInt(8 * i as u64))
    };
    [1, 2, 3].into_iter().fold(byte(0), |words, i| B::bitwise_or(words, byte(i)))
}

/// The bytes of u32 words, the low one first: i32 `[4 · words]`.
fn bytes<B: Backend>(words: IntTensor<B>) -> IntTensor<B> {
    let len = words.shape().num_elements();
    let words = B::int_reshape(words, shape([len, 1]));
    let byte = |i: u64| {
        let shifted = B::bitwise_right_shift_scalar(words.clone(), Scalar::UInt(8 * i));
        B::int_cast(B::bitwise_and_scalar(shifted, Scalar::UInt(0xff)), IntDType::I32)
    };
    B::int_reshape(B::int_cat((0..4).map(byte).collect(), 1), Shape::from(vec![4 * len]))
}

fn shape(dims: [usize; 2]) -> Shape {
    Shape::from(dims.to_vec())
}
