//! Type-directed unwrapping and wrapping for the `forward!` macro. An inherent method of the exact
//! type takes precedence over the trait's pass-through, so one macro body fits every signature.
use burn_backend::TensorPrimitive;
use burn_backend::ops::*;
use burn_backend::tensor::quantization::QuantizationParametersPrimitive;

use super::Float8;
use crate::layer::Mark;
use crate::tensor::{Float8Tensor, Wrapped};

pub(super) struct Arg<T>(pub T);
pub(super) trait PassArg: Sized {
    type T;
    /// Unwraps the argument. `operation` names the caller.
    fn unwrap(self, operation: &'static str) -> Self::T;
    fn mark(&self) -> Option<Mark> {
        None
    }
    fn is_float(&self) -> bool {
        false
    }
}
impl<T> PassArg for Arg<T> {
    type T = T;
    fn unwrap(self, _: &'static str) -> T {
        self.0
    }
}
type Inner<B> = burn_backend::tensor::FloatTensor<B>;
impl<B: Wrapped> Arg<Float8Tensor<B>> {
    pub(super) fn unwrap(self, operation: &'static str) -> Inner<B> {
        self.0.into_values(operation)
    }
}
impl<'a, B: Wrapped> Arg<&'a Float8Tensor<B>> {
    pub(super) fn unwrap(self, _: &'static str) -> &'a Inner<B> {
        self.0.full()
    }
    pub(super) fn mark(&self) -> Option<Mark> {
        self.0.mark().cloned()
    }
    pub(super) fn is_float(&self) -> bool {
        true
    }
}
impl<B: Wrapped> Arg<Option<Float8Tensor<B>>> {
    pub(super) fn unwrap(self, operation: &'static str) -> Option<Inner<B>> {
        self.0.map(|t| t.into_values(operation))
    }
}
impl<B: Wrapped> Arg<TensorPrimitive<Float8<B>>> {
    pub(super) fn unwrap(self, operation: &'static str) -> TensorPrimitive<B> {
        match self.0 {
            TensorPrimitive::Float(t) => TensorPrimitive::Float(t.into_values(operation)),
            TensorPrimitive::QFloat(t) => TensorPrimitive::QFloat(t),
        }
    }
}
impl<B: Wrapped> Arg<QuantizationParametersPrimitive<Float8<B>>> {
    pub(super) fn unwrap(self, operation: &'static str) -> QuantizationParametersPrimitive<B> {
        QuantizationParametersPrimitive { scales: self.0.scales.into_values(operation) }
    }
}
impl<B: Wrapped> Arg<TransactionPrimitive<Float8<B>>> {
    pub(super) fn unwrap(self, operation: &'static str) -> TransactionPrimitive<B> {
        let t = self.0;
        let floats = t.read_floats.into_iter().map(|t| t.into_values(operation)).collect();
        TransactionPrimitive::new(floats, t.read_qfloats, t.read_ints, t.read_bools)
    }
}

pub(super) struct Ret<T>(core::marker::PhantomData<T>);
pub(super) trait PassRet {
    type T;
    fn wrap(t: Self::T) -> Self::T {
        t
    }
}
impl<T> PassRet for Ret<T> {
    type T = T;
}
impl<B: Wrapped> Ret<Float8Tensor<B>> {
    pub(super) fn wrap(t: Inner<B>) -> Float8Tensor<B> {
        Float8Tensor::new(t)
    }
}
impl<B: Wrapped, T> Ret<(Float8Tensor<B>, T)> {
    pub(super) fn wrap(t: (Inner<B>, T)) -> (Float8Tensor<B>, T) {
        (Float8Tensor::new(t.0), t.1)
    }
}
impl<B: Wrapped> Ret<TensorPrimitive<Float8<B>>> {
    pub(super) fn wrap(t: TensorPrimitive<B>) -> TensorPrimitive<Float8<B>> {
        match t {
            TensorPrimitive::Float(t) => TensorPrimitive::Float(Float8Tensor::new(t)),
            TensorPrimitive::QFloat(t) => TensorPrimitive::QFloat(t),
        }
    }
}
impl<B: Wrapped> Ret<DeformConv2dBackward<Float8<B>>> {
    pub(super) fn wrap(g: DeformConv2dBackward<B>) -> DeformConv2dBackward<Float8<B>> {
        let w = Float8Tensor::new;
        DeformConv2dBackward::new(
            w(g.x_grad),
            w(g.offset_grad),
            w(g.weight_grad),
            g.mask_grad.map(w),
            g.bias_grad.map(w),
        )
    }
}
impl<B: Wrapped> Ret<MaxPool1dWithIndices<Float8<B>>> {
    pub(super) fn wrap(t: MaxPool1dWithIndices<B>) -> MaxPool1dWithIndices<Float8<B>> {
        MaxPool1dWithIndices::new(Float8Tensor::new(t.output), t.indices)
    }
}
impl<B: Wrapped> Ret<MaxPool2dWithIndices<Float8<B>>> {
    pub(super) fn wrap(t: MaxPool2dWithIndices<B>) -> MaxPool2dWithIndices<Float8<B>> {
        MaxPool2dWithIndices::new(Float8Tensor::new(t.output), t.indices)
    }
}
impl<B: Wrapped> Ret<MaxPool1dBackward<Float8<B>>> {
    pub(super) fn wrap(t: MaxPool1dBackward<B>) -> MaxPool1dBackward<Float8<B>> {
        MaxPool1dBackward::new(Float8Tensor::new(t.x_grad))
    }
}
impl<B: Wrapped> Ret<MaxPool2dBackward<Float8<B>>> {
    pub(super) fn wrap(t: MaxPool2dBackward<B>) -> MaxPool2dBackward<Float8<B>> {
        MaxPool2dBackward::new(Float8Tensor::new(t.x_grad))
    }
}
