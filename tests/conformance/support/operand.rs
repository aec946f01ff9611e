//! Quantization through a backend, with the codes read back.
use burn::tensor::{Tensor, TensorData, backend::Backend};
use burn_float8::{Cast, Float8Backend, Granularity, HostCodes, Orientation, ScaleFrom};
use float8_kernels::reference;

/// The copies of a matrix in both orientations.
pub fn quantize<B: Float8Backend>(x: Tensor<B, 2>, cast: Cast) -> [HostCodes; 2] {
    let x = x.into_primitive().tensor();
    let copies = B::fp8_quantize(x, cast, Orientation::Both, ScaleFrom::Dynamic);
    [copies.rows, copies.cols].map(|operand| B::fp8_read(&operand.expect("both were asked for")))
}

/// The values of codes read back.
pub fn dequantized(copy: &HostCodes) -> Vec<f32> {
    let [rows, k] = copy.dims;
    let [_, scales] = copy.granularity.scale_dims(rows, k);
    let value = |(i, code): (usize, &u8)| {
        let (r, c) = (i / k, i % k);
        let scale = match copy.granularity {
            Granularity::Tensor => 0,
            Granularity::Row => r,
            Granularity::Block1x128 => r * scales + c / 128,
            Granularity::Block128x128 => r / 128 * scales + c / 128,
            Granularity::Block1x32 => r * scales + c / 32,
        };
        reference::decode(*code, copy.format) * copy.inv_scales[scale].get()
    };
    copy.codes.iter().enumerate().map(value).collect()
}

/// A tensor on the default device.
pub fn tensor<B: Backend, const D: usize>(values: Vec<f32>, shape: [usize; D]) -> Tensor<B, D> {
    Tensor::from_data(TensorData::new(values, shape), &Default::default())
}

/// The values of a tensor, converted to f32.
pub fn values<B: Backend, const D: usize>(tensor: Tensor<B, D>) -> Vec<f32> {
    tensor.into_data().convert::<f32>().to_vec().expect("converted to f32")
}
