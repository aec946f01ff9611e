//! [`Float8`]: forwards all operations of a wrapped backend except linears.
mod attention;
mod autodiff;
mod call;
mod convert;
mod delegate;
#[cfg(feature = "distributed")]
mod distributed;
mod embedding;
mod full_tensor;
pub(crate) mod functions;
mod fused;
mod grouped;
mod linear;
mod matmul;
mod nodes;
mod parallel;

use core::marker::PhantomData;

use burn_autodiff::NodeId;
use burn_autodiff::grads::Gradients;
use burn_backend::Backend;
use burn_backend::tensor::FloatTensor;

pub use parallel::matrix;

/// Backend that runs linear layers in FP8. It wraps the backend that you train with.
///
/// `Float8<W>` forwards every operation to `W` except `linear`. A linear runs its three GEMMs in
/// FP8. It is one autodiff node, which keeps xᵀ in FP8 instead of x.
///
/// x may be f32, f16 or bf16, if the device stores that dtype. y has x's dtype. The weight may be wider.
/// On CPUs and wgpu FP8 is emulated. The kernels for NVIDIA GPUs have not run on one yet.
///
/// ```
/// # #[cfg(feature = "flex")] {
/// use burn::backend::{Autodiff, Flex};
/// use burn_float8::Float8;
///
/// type Training = Float8<Autodiff<Flex>>;
/// type Inference = Float8<Flex>; // what `valid()` gives
/// # }
/// ```
///
/// In the other order backward would not know the layer of a linear.
/// [`Float8Config::apply`](crate::Float8Config::apply) does not compile for it:
///
/// ```compile_fail
/// use burn::backend::{Autodiff, Flex};
/// use burn_float8::{Float8, Float8Config};
///
/// type Wrong = Autodiff<Float8<Flex>>;
/// let model = burn::nn::LinearConfig::new(8, 8).init::<Wrong>(&Default::default());
/// Float8Config::tensorwise().apply(model).unwrap().0;
/// ```
#[derive(Clone, Copy, Debug, Default)]
pub struct Float8<W>(PhantomData<W>);

/// Registers the gradient of each tracked parent of a node.
fn register_gradients<B: Backend>(
    grads: &mut Gradients,
    parents: impl IntoIterator<Item = Option<NodeId>>,
    gradients: impl IntoIterator<Item = Option<FloatTensor<B>>>,
) {
    for (parent, gradient) in parents.into_iter().zip(gradients) {
        if let (Some(id), Some(gradient)) = (parent, gradient) {
            grads.register::<B>(id, gradient);
        }
    }
}
