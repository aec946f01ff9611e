//! Quantization through a backend, with the codes read back.
use burn::tensor::{Tensor, TensorData, backend::Backend};
use burn_float8::{Cast, Float8Backend, HostCodes, Orientation, ScaleFrom};

/// The copies of a matrix in both orientations.
pub fn quantize<B: Float8Backend>(x: Tensor<B, 2>, cast: Cast) -> [HostCodes; 2] {
    let x = x.into_primitive().tensor();
    let copies = B::fp8_quantize(x, cast, Orientation::Both, ScaleFrom::Own);
    [copies.rows, copies.cols].map(|operand| B::fp8_read(&operand.expect("both were asked for")))
}

/// A tensor on the default device.
pub fn tensor<B: Backend, const D: usize>(values: Vec<f32>, shape: [usize; D]) -> Tensor<B, D> {
    Tensor::from_data(TensorData::new(values, shape), &Default::default())
}

/// The values of a tensor, converted to f32.
pub fn values<B: Backend, const D: usize>(tensor: Tensor<B, D>) -> Vec<f32> {
    tensor.into_data().convert::<f32>().to_vec().expect("converted to f32")
}

/// The values of a row-major `[rows, cols]` as `[cols, rows]`.
pub fn transpose<T: Copy>(values: &[T], [rows, cols]: [usize; 2]) -> Vec<T> {
    (0..cols).flat_map(|c| (0..rows).map(move |r| values[r * cols + c])).collect()
}
