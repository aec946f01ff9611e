//! [`Float8`]: the operations of a wrapped backend, all but the linears forwarded.
mod call;
mod convert;
mod delegate;
#[cfg(feature = "distributed")]
mod distributed;
mod embedding;
pub(crate) mod full_tensor;
pub(crate) mod functions;
pub(crate) mod grouped;
pub(crate) mod linear;
pub(crate) mod linear_saved;
mod matmul;

use core::marker::PhantomData;

/// A backend whose linear layers run in FP8.
///
/// `Float8<B>` forwards every operation to `B` and overrides three: `linear`, `linear_x_backward` and
/// `linear_weight_backward`. Differentiation goes outside:
///
/// ```
/// # #[cfg(feature = "flex")]
/// type B = burn::backend::Autodiff<burn_float8::Float8<burn::backend::Flex>>;
/// ```
///
/// The other order does not compile, since the FP8 casts must not be differentiated through:
///
/// ```compile_fail
/// type B = burn_float8::Float8<burn::backend::Autodiff<burn::backend::Flex>>;
/// fn backend<B: burn::tensor::backend::Backend>() {}
/// backend::<B>();
/// ```
#[derive(Clone, Copy, Debug, Default)]
pub struct Float8<B>(PhantomData<B>);
