//! `host_backend!`: the host path as a [`Float8Backend`](crate::backend::Float8Backend), written once for every CPU backend.

/// Implements [`Float8Backend`](crate::backend::Float8Backend) for a CPU backend of your own by the host path; `Flex` and `NdArray` have it.
///
/// ```text
/// burn_float8::host_backend!(MyCpuBackend);
/// ```
#[macro_export]
macro_rules! host_backend {
    ($backend:ty) => {
        impl $crate::backend::Float8Backend for $backend {
            type Operand = $crate::backend::host::HostOperand<$crate::__private::Device<Self>>;

            fn fp8_supports(device: &$crate::__private::Device<Self>, dtype: $crate::__private::DType) -> bool {
                $crate::backend::host::supports::<Self>(device, dtype)
            }

            fn fp8_quantize(
                x: $crate::__private::FloatTensor<Self>,
                cast: $crate::backend::Cast,
                orientation: $crate::backend::Orientation,
                scale: $crate::backend::ScaleFrom<$crate::__private::FloatTensor<Self>>,
            ) -> $crate::backend::Quantized<Self> {
                $crate::backend::host::quantize::<Self>(x, cast, orientation, scale)
            }

            fn fp8_matmul(gemm: $crate::backend::GemmRequest<'_, Self>) -> $crate::__private::FloatTensor<Self> {
                let $crate::backend::GemmRequest { a, b, bias, groups, shape, dtype, .. } = gemm;
                $crate::backend::host::matmul::<Self>([a, b], bias, groups, shape, dtype)
            }

            fn fp8_independent_rows() -> usize {
                $crate::backend::host::INDEPENDENT_ROWS
            }

            fn fp8_health(
                x: $crate::__private::FloatTensor<Self>,
                operand: &Self::Operand,
                transposed: bool,
            ) -> $crate::__private::FloatTensor<Self> {
                $crate::backend::host::health::<Self>(x, operand, transposed)
            }

            const ATTENTION: &'static str = "tiles";

            fn attention_forward(
                attention: &$crate::backend::Attention<Self>,
            ) -> $crate::backend::AttentionOutput<Self> {
                $crate::backend::host::attention_forward(attention)
            }

            fn cached_attention(
                attention: &$crate::backend::CachedAttention<Self>,
            ) -> Option<$crate::__private::FloatTensor<Self>> {
                $crate::backend::host::cached_attention(attention)
            }

            fn attention_backward(
                attention: &$crate::backend::Attention<Self>,
                saved: Option<($crate::__private::FloatTensor<Self>, $crate::__private::FloatTensor<Self>)>,
                dy: $crate::__private::FloatTensor<Self>,
            ) -> [$crate::__private::FloatTensor<Self>; 3] {
                $crate::backend::host::attention_backward(attention, saved, dy)
            }

            fn fused_forward(
                op: &$crate::backend::Fused<Self>,
                inputs: &[$crate::__private::FloatTensor<Self>],
            ) -> $crate::__private::FloatTensor<Self> {
                $crate::backend::host::fused_forward(op, inputs)
            }

            fn fused_backward(
                op: &$crate::backend::Fused<Self>,
                inputs: &[$crate::__private::FloatTensor<Self>],
                dy: &$crate::__private::FloatTensor<Self>,
            ) -> Vec<$crate::__private::FloatTensor<Self>> {
                $crate::backend::host::fused_backward(op, inputs, dy)
            }

            fn adamw() -> Option<$crate::backend::AdamWFn<Self>> {
                Some($crate::backend::host::adamw::<Self>)
            }

            fn fp8_size(operand: &Self::Operand) -> $crate::backend::OperandSize {
                $crate::backend::host::size(operand)
            }

            fn fp8_read(operand: &Self::Operand) -> $crate::backend::HostCodes {
                $crate::backend::host::read_codes(operand)
            }

            fn fp8_dequantize(operand: &Self::Operand) -> $crate::__private::FloatTensor<Self> {
                $crate::backend::host::dequantize::<Self>(operand)
            }

            fn fp8_transpose(operand: &Self::Operand) -> Self::Operand {
                $crate::backend::host::transpose_operand(operand)
            }

            fn fp8_write(codes: $crate::backend::HostCodes, device: &$crate::__private::Device<Self>) -> Self::Operand {
                $crate::backend::host::write_codes(codes, device)
            }
        }
    };
}

#[cfg(feature = "flex")]
host_backend!(burn_flex::Flex);
#[cfg(feature = "ndarray")]
host_backend!(burn_ndarray::NdArray);
