//! How a forward pass runs its linears, and those of its experts.
//!
//! ```text
//! linears    Linear::forward, or burn_float8::linear, whose backward state is the FP8 operand of x instead of x
//! experts    burn_float8::grouped_matmul, or grouped_linear, which is in FP8 where the weights' recipe is
//! ```
//! [`Llama<B>`](crate::Llama) takes any backend, `burn_float8`'s functions only those with a `Float8` in them. So the model
//! keeps pointers to the functions whose types are erased, and a forward pass on a backend that they were made for finds
//! them again. Nothing is saved for backward on the backend of `valid()`, so `Linear::forward` serves there.

use std::any::Any;
use std::fmt;
use std::sync::Arc;

use burn::nn::Linear;
use burn::tensor::backend::Backend;
use burn::tensor::{Int, Tensor};
use burn_float8::{Float8, Float8Ops, GroupedLinear, grouped_matmul};

/// y `[M, N]` of x `[M, K]`, w `[K, N]` and b `[N]`.
type LinearFn<B> = fn(Tensor<B, 2>, Tensor<B, 2>, Option<Tensor<B, 1>>) -> Tensor<B, 2>;

/// y `[M, N]` of x `[M, K]`, w `[G, K, N]` and the ends of the groups of rows, `[G]`.
type GroupedFn<B> = fn(Tensor<B, 2>, Tensor<B, 3>, Tensor<B, 1, Int>) -> Tensor<B, 2>;

/// What the model keeps: a `LinearFn` and `GroupedFn`s, each of one backend.
#[derive(Clone, Default)]
pub(crate) struct ErasedLinears(Vec<Arc<dyn Any + Send + Sync>>);

impl ErasedLinears {
    /// And [`burn_float8::linear`] on `B`.
    pub(crate) fn saving_fp8_operands<B: Float8Ops>(self) -> Self {
        let function: LinearFn<B> = burn_float8::linear::<B, 2>;
        self.and(function)
    }

    /// And [`burn_float8::grouped_linear`] on `B` and on the backend below its autodiff.
    pub(crate) fn with_float8_experts<B: Float8Ops>(self) -> Self {
        let training: GroupedFn<B> = burn_float8::grouped_linear::<B>;
        let evaluation: GroupedFn<Float8<B::Inner>> = burn_float8::grouped_linear::<Float8<B::Inner>>;
        self.and(training).and(evaluation)
    }

    fn and<F: Any + Send + Sync>(mut self, function: F) -> Self {
        self.0.push(Arc::new(function));
        self
    }

    /// How linears run on `B`.
    pub(crate) fn on<B: Backend>(&self) -> Linears<B> {
        Linears { linear: self.find(), grouped: self.find() }
    }

    fn find<F: Any + Copy>(&self) -> Option<F> {
        self.0.iter().find_map(|function| function.downcast_ref().copied())
    }
}

impl fmt::Debug for ErasedLinears {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} functions of burn_float8", self.0.len())
    }
}

/// How the linears of one forward pass run.
#[derive(Clone, Debug)]
pub struct Linears<B: Backend> {
    /// `Linear::forward` if absent.
    linear: Option<LinearFn<B>>,
    /// `grouped_matmul` if absent.
    grouped: Option<GroupedFn<B>>,
}

impl<B: Backend> Linears<B> {
    /// By Burn's own operations.
    pub fn plain() -> Self {
        Self { linear: None, grouped: None }
    }

    /// `[M, K]` → `[M, N]`.
    pub(crate) fn run(&self, linear: &Linear<B>, x: Tensor<B, 2>) -> Tensor<B, 2> {
        match self.linear {
            Some(function) => function(x, linear.weight.val(), linear.bias.as_ref().map(|bias| bias.val())),
            None => linear.forward(x),
        }
    }

    /// `[M, K]` → `[M, N]`: the rows of group g, which end before `ends[g]`, through linear g.
    pub(crate) fn run_grouped(
        &self,
        linear: &GroupedLinear<B>,
        x: Tensor<B, 2>,
        ends: Tensor<B, 1, Int>,
    ) -> Tensor<B, 2> {
        self.grouped.unwrap_or(grouped_matmul::<B>)(x, linear.weight.val(), ends)
    }
}

impl<B: Float8Ops> Linears<B> {
    /// Experts by [`burn_float8::grouped_linear`].
    pub fn float8() -> Self {
        Self { grouped: Some(burn_float8::grouped_linear::<B>), ..Self::plain() }
    }
}
