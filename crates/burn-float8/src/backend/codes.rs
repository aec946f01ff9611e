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
            let places: Vec<i32> = mx::from_blocked(&places(inv_scale.shape().num_elements()), rows, width);
            let places = B::int_from_data(TensorData::new(places, [height * width]), &device);
            let bytes = B::int_select(bytes::<B>(inv_scale.clone()), 0, places);
            let scales = B::float_select(table(&|byte| InvScale::from_e8m0(byte).get()), 0, bytes);
            B::float_reshape(scales, shape([height, width]))
        }
        _ => inv_scale.clone(),
    };
    B::float_mul(values, spread::<B>(scales, [height, width], granularity.group(rows, *k), [rows, *k]))
}

/// The number of each byte of so many words.
fn places(words: usize) -> Vec<i32> {
    (0..4 * words as i32).collect()
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
    let codes = B::int_reshape(codes, Shape::from(vec![k, row_words(rows), 4]));
    let byte = |i: usize| {
        let byte = B::int_slice(codes.clone(), &[Slice::full(), Slice::full(), Slice::from(i..i + 1)]);
        let byte = B::int_cast(B::int_reshape(byte, shape([k, row_words(rows)])), IntDType::U32);
        B::bitwise_left_shift_scalar(byte, Scalar::UInt(8 * i as u64))
    };
    let words = [1, 2, 3].into_iter().fold(byte(0), |words, i| B::bitwise_or(words, byte(i)));
    DeviceOperand { codes: words, inv_scale: B::float_transpose(inv_scale), k: rows, format, granularity, power_of_two }
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
