//! What is made of codes in host memory: the values that they stand for, and the transpose.
use std::sync::Arc;

use burn_backend::tensor::{Device, FloatTensor};
use burn_backend::{Backend, TensorData};

use super::{HostOperand, loops};

/// [`Float8Backend::fp8_dequantize`](crate::backend::Float8Backend::fp8_dequantize) on the host.
pub fn dequantize<B: Backend>(operand: &HostOperand<Device<B>>) -> FloatTensor<B> {
    let HostOperand { device, codes, dims, transposed, inv_scales, format, .. } = operand;
    let values = loops::dequantize(codes, dims[1], *format, operand.group(), inv_scales);
    let values = B::float_from_data(TensorData::new(values, *dims), device);
    if *transposed { B::float_transpose(values) } else { values }
}

/// [`Float8Backend::fp8_transpose`](crate::backend::Float8Backend::fp8_transpose) on the host, where the codes stay where they are.
pub fn transpose_operand<D: Clone>(operand: &HostOperand<D>) -> HostOperand<D> {
    let (codes, inv_scales) = (Arc::clone(&operand.codes), Arc::clone(&operand.inv_scales));
    HostOperand { transposed: !operand.transposed, codes, inv_scales, ..operand.clone() }
}
