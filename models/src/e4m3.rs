//! E4M3 codes packed into integer tensors, four per word, with one scale per head and position.
//! Uses only operations that every backend has.
//!
//! ```text
//! inv_scale = max(max |x|, 1e-12) / 448
//! code      = e4m3(x / inv_scale), to nearest, ties to even
//! value     = code · inv_scale
//! ```

use burn::tensor::backend::Backend;
use burn::tensor::{DType, ElementConversion, Int, Tensor, TensorData};

/// Codes per 32-bit word.
pub(crate) const CODES: usize = 4;
/// Largest value.
const MAX: f32 = 448.0;
/// Code of the largest value, without sign.
const MAX_CODE: u8 = 0x7e;
const NAN_CODE: i32 = 0x7f;

/// Value of a code without sign that is not NaN.
fn value(code: u8) -> f32 {
    match (i32::from(code >> 3), f32::from(code & 7)) {
        (0, mantissa) => mantissa * f32::powi(2.0, -9),
        (exponent, mantissa) => (8.0 + mantissa) * f32::powi(2.0, exponent - 10),
    }
}

/// Threshold that a magnitude must exceed to have a code above 0, 1, ..: ties go to the even code.
fn thresholds() -> [f32; 127] {
    std::array::from_fn(|code| match code as u8 {
        code if code >= MAX_CODE => f32::MAX,
        code => {
            let middle = (value(code) + value(code + 1)) / 2.0;
            if code.is_multiple_of(2) { middle } else { middle.next_down() }
        }
    })
}

/// Encodes x `[B, H, T, d]`: words `[B, H, T, d / 4]` and scales `[B, H, T, 1]`, f32.
pub(crate) fn encode<B: Backend>(x: Tensor<B, 4>) -> (Tensor<B, 4, Int>, Tensor<B, 4>) {
    let ([batch, heads, len, dim], device) = (x.dims(), x.device());
    let x = x.cast(DType::F32);
    let inv_scales = x.clone().abs().max_dim(3).clamp_min(1e-12).div_scalar(MAX);
    let words = dim.div_ceil(CODES);
    let padded = match words * CODES - dim {
        0 => x,
        missing => Tensor::cat(vec![x, Tensor::zeros([batch, heads, len, missing], &device)], 3),
    };
    let is_nan = padded.clone().is_nan();
    let magnitude = padded.clone().abs() / inv_scales.clone();
    let shape = magnitude.dims();
    let table = Tensor::<B, 1>::from_data(TensorData::from(thresholds()), (&device, DType::F32));
    // Binary search in seven steps.
    let mut codes = Tensor::<B, 4, Int>::zeros(shape, &device);
    for step in [64, 32, 16, 8, 4, 2, 1] {
        let at = codes.clone().add_scalar(step - 1).flatten::<1>(0, 3);
        let threshold = table.clone().select(0, at).reshape(shape);
        codes = codes + magnitude.clone().greater(threshold).int().mul_scalar(step);
    }
    let codes = codes.mask_fill(is_nan, NAN_CODE);
    let signs = padded.lower_elem(0.0).int();
    // The sign of the last code is the sign bit of the word.
    let weights = |sign: i64| -> Tensor<B, 5, Int> {
        let of_codes = [sign, sign << 8, sign << 16, if sign == 1 { 1 << 24 } else { -(sign << 24) }];
        Tensor::<B, 1, Int>::from_data(TensorData::from(of_codes), &device).reshape([1, 1, 1, 1, CODES])
    };
    let apart = |t: Tensor<B, 4, Int>| t.reshape([batch, heads, len, words, CODES]);
    let sum = apart(codes) * weights(1) + apart(signs) * weights(128);
    (sum.sum_dim(4).reshape([batch, heads, len, words]).cast(DType::I32), inv_scales)
}

/// Decodes the result of [`encode`] to f32: `[B, H, S, d]`.
pub(crate) fn decode<B: Backend>(words: Tensor<B, 4, Int>, inv_scales: Tensor<B, 4>, dim: usize) -> Tensor<B, 4> {
    let ([batch, heads, len, count], device) = (words.dims(), words.device());
    let of_code = |code: u8| match code & 0x7f {
        magnitude if magnitude > MAX_CODE => f32::NAN,
        magnitude => value(magnitude).copysign(if code > 0x7f { -1.0 } else { 1.0 }),
    };
    let table: [f32; 256] = std::array::from_fn(|code| of_code(code as u8));
    let table = Tensor::<B, 1>::from_data(TensorData::from(table), (&device, DType::F32));
    let codes = (0..CODES as i32).map(|i| {
        words.clone().bitwise_right_shift_scalar((8 * i).elem()).bitwise_and_scalar(0xff.elem()).unsqueeze_dim(4)
    });
    let codes = Tensor::<B, 5, Int>::cat(codes.collect(), 4);
    let values = table.select(0, codes.flatten::<1>(0, 4)).reshape([batch, heads, len, count * CODES]);
    values.slice_dim(3, 0..dim) * inv_scales
}

#[cfg(test)]
mod tests {
    use burn::backend::Flex;

    use super::*;

    fn tensor(values: &[f32], shape: [usize; 4]) -> Tensor<Flex, 4> {
        Tensor::from_data(TensorData::new(values.to_vec(), shape), &Default::default())
    }

    fn values(x: Tensor<Flex, 4>) -> Vec<f32> {
        x.into_data().to_vec().unwrap()
    }

    /// Every value, every midpoint between neighbours, and the floats next to it: to nearest, ties
    /// to even.
    #[test]
    fn codes_are_rounded_to_nearest_even() {
        let all: Vec<f32> = (0..=MAX_CODE).map(value).collect();
        for pair in all.windows(2) {
            let middle = (pair[0] + pair[1]) / 2.0;
            let even = if all.iter().position(|value| *value == pair[0]).unwrap() % 2 == 0 { pair[0] } else { pair[1] };
            let x = [pair[0], middle.next_down(), middle, middle.next_up(), pair[1], -middle, MAX, -MAX];
            let (words, inv_scales) = encode(tensor(&x, [1, 1, 1, 8]));
            assert_eq!(values(inv_scales.clone()), [1.0]);
            assert_eq!(words.dtype(), DType::I32);
            let wanted = [pair[0], pair[0], even, pair[1], pair[1], -even, MAX, -MAX];
            assert_eq!(values(decode(words, inv_scales, 8)), wanted, "{middle}");
        }
    }

    #[test]
    fn heads_have_scales_of_their_own_and_any_width() {
        let x: Vec<f32> =
            (0..2 * 3 * 5 * 6).map(|i| ((i * 37 % 101) as f32 - 50.0) * f32::powi(8.0, i / 6 % 7 - 3)).collect();
        let (words, inv_scales) = encode(tensor(&x, [2, 3, 5, 6]));
        assert_eq!((words.dims(), inv_scales.dims()), ([2, 3, 5, 2], [2, 3, 5, 1]));
        let decoded = values(decode(words, inv_scales, 6));
        for (x, decoded) in x.chunks(6).zip(decoded.chunks(6)) {
            let largest = x.iter().fold(0.0_f32, |max, x| max.max(x.abs()));
            for (x, decoded) in x.iter().zip(decoded) {
                assert!((x - decoded).abs() <= (x.abs() / 16.0).max(largest / 448.0 / 1024.0) * 1.001, "{x} {decoded}");
            }
        }
    }

    #[test]
    fn zeros_stay_and_a_nan_is_not_lost() {
        let (words, inv_scales) = encode(tensor(&[0.0; 4], [1, 1, 1, 4]));
        assert_eq!(values(decode(words, inv_scales, 4)), [0.0; 4]);
        let (words, inv_scales) = encode(tensor(&[1.0, f32::NAN, 2.0, -3.0], [1, 1, 1, 4]));
        assert!(values(decode(words, inv_scales, 4))[1].is_nan());
    }
}
