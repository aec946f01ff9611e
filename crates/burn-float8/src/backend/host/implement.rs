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

            fn fp8_facts(device: &$crate::__private::Device<Self>) -> $crate::backend::DeviceFacts {
                $crate::backend::host::facts::<Self>(device)
            }

            fn fp8_gemm_path(
                _: &$crate::__private::Device<Self>,
                _: Option<usize>,
                _: [$crate::config::Granularity; 2],
                _: $crate::backend::GemmConfig,
            ) -> $crate::backend::GemmPath {
                $crate::backend::GemmPath::Host
            }

            fn fp8_quantize(
                x: $crate::__private::FloatTensor<Self>,
                cast: $crate::backend::Cast,
                orientation: $crate::backend::Orientation,
                scale: $crate::backend::ScaleFrom<$crate::__private::FloatTensor<Self>>,
            ) -> $crate::backend::Quantized<Self> {
                $crate::backend::host::quantize::<Self>(x, cast, orientation, scale)
            }

            fn fp8_matmul(
                operands: [&Self::Operand; 2],
                bias: Option<$crate::__private::FloatTensor<Self>>,
                groups: Option<$crate::backend::GroupEnds<$crate::__private::IntTensor<Self>>>,
                shape: $crate::__private::Shape,
                dtype: $crate::__private::FloatDType,
                _: $crate::backend::GemmConfig,
            ) -> $crate::__private::FloatTensor<Self> {
                $crate::backend::host::matmul::<Self>(operands, bias, groups, shape, dtype)
            }

            fn fp8_health(
                x: $crate::__private::FloatTensor<Self>,
                operand: &Self::Operand,
                transposed: bool,
            ) -> $crate::__private::FloatTensor<Self> {
                $crate::backend::host::health::<Self>(x, operand, transposed)
            }

            fn fused(
                op: &$crate::backend::Fused<Self>,
                inputs: &[$crate::__private::FloatTensor<Self>],
                backward: Option<$crate::backend::FusedBackward<'_, Self>>,
            ) -> Vec<$crate::__private::FloatTensor<Self>> {
                $crate::backend::host::fused(op, inputs, backward)
            }

            fn cached_attention(
                attention: &$crate::backend::CachedAttention<Self>,
            ) -> Option<$crate::__private::FloatTensor<Self>> {
                $crate::backend::host::cached_attention(attention)
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
