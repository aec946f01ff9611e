//! Quantization through a backend, with the codes read back.
use burn::tensor::{Tensor, TensorData, backend::Backend};
use burn_float8::backend::{Cast, Float8Backend, HostCodes, Orientation};
use float8_kernels::reference::{self, HostOperand};

/// Copies of a matrix in both orientations.
pub fn quantize<B: Float8Backend>(x: Tensor<B, 2>, cast: Cast) -> [HostCodes; 2] {
    let x = x.into_primitive().tensor();
    let copies = B::fp8_quantize(x, cast, Orientation::Both, None);
    [copies.rows, copies.cols].map(|operand| B::fp8_read(&operand.expect("both were asked for")))
}

/// Values of codes that were read back.
pub fn dequantized(copy: &HostCodes) -> Vec<f32> {
    let HostCodes { codes, inv_scales, dims: [rows, k], format, granularity, .. } = copy;
    let (rows, k, format, granularity) = (*rows, *k, *format, *granularity);
    let operand = HostOperand { codes, rows, k, format, granularity, inv_scales };
    let value = |(i, &code): (usize, &u8)| reference::decode(code, format) * operand.inv_scale(i / k, i % k);
    codes.iter().enumerate().map(value).collect()
}

/// Creates a tensor on the default device.
pub fn tensor<B: Backend, const D: usize>(values: Vec<f32>, shape: [usize; D]) -> Tensor<B, D> {
    Tensor::from_data(TensorData::new(values, shape), &Default::default())
}

/// Values of a tensor, converted to f32.
pub fn values<B: Backend, const D: usize>(tensor: Tensor<B, D>) -> Vec<f32> {
    tensor.into_data().convert::<f32>().to_vec().expect("converted to f32")
}
