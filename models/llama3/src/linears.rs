//! How a forward pass runs its linears: by `Linear::forward`, or by [`burn_float8::linear`], whose backward state is the FP8
//! operand of x instead of x.
//!
//! [`Llama<B>`](crate::Llama) takes any backend, `burn_float8::linear` only those with a `Float8` in them. So the model
//! keeps a pointer to the function whose type is erased, and a forward pass on the backend that it was made for finds it
//! again; on another one, such as that of `valid()`, nothing is saved for backward and `Linear::forward` serves.

use std::any::Any;
use std::fmt;
use std::sync::Arc;

use burn::nn::Linear;
use burn::tensor::Tensor;
use burn::tensor::backend::Backend;
use burn_float8::Float8Ops;

/// y `[M, N]` of x `[M, K]`, w `[K, N]` and b `[N]`.
type LinearFn<B> = fn(Tensor<B, 2>, Tensor<B, 2>, Option<Tensor<B, 1>>) -> Tensor<B, 2>;

/// What the model keeps: nothing, or a `LinearFn` of one backend.
#[derive(Clone, Default)]
pub(crate) struct ErasedLinear(Option<Arc<dyn Any + Send + Sync>>);

impl ErasedLinear {
    /// [`burn_float8::linear`] on `B`.
    pub(crate) fn saving_fp8_operands<B: Float8Ops>() -> Self {
        let function: LinearFn<B> = burn_float8::linear::<B, 2>;
        Self(Some(Arc::new(function)))
    }

    /// How linears run on `B`.
    pub(crate) fn on<B: Backend>(&self) -> Linears<B> {
        Linears(self.0.as_ref().and_then(|function| function.downcast_ref().copied()))
    }
}

impl fmt::Debug for ErasedLinear {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.0.is_some() { "burn_float8::linear" } else { "Linear::forward" })
    }
}

/// How the linears of one forward pass run.
#[derive(Clone, Debug)]
pub(crate) struct Linears<B: Backend>(Option<LinearFn<B>>);

impl<B: Backend> Linears<B> {
    /// `[M, K]` → `[M, N]`.
    pub(crate) fn run(&self, linear: &Linear<B>, x: Tensor<B, 2>) -> Tensor<B, 2> {
        match self.0 {
            Some(function) => function(x, linear.weight.val(), linear.bias.as_ref().map(|bias| bias.val())),
            None => linear.forward(x),
        }
    }
}
