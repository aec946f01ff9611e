//! Forward and backward of one linear from a given gradient, like `torch.autograd.grad(y, inputs, dy)`.
//!
//! Burn's backward starts from ones. Here that is a tensor of one element, made by a node that
//! passes dy on.

use burn::backend::Autodiff;
use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::checkpoint::strategy::NoCheckpointing;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind};
use burn::tensor::backend::{AutodiffBackend, Backend};
use burn::tensor::module::linear;
use burn::tensor::ops::FloatTensor;
use burn::tensor::{DType, Distribution, Tensor, TensorPrimitive};
use burn_float8::backend::Float8Backend;
use burn_float8::{Float8, Float8Tensor};

/// Registers its state as the gradient of its input.
#[derive(Debug)]
struct Given;

impl<B: Backend> Backward<B, 1> for Given {
    type State = FloatTensor<B>;

    fn backward(self, ops: Ops<Self::State, 1>, grads: &mut Gradients, _: &mut Checkpointer) {
        drop(grads.consume::<B>(&ops.node));
        if let [Some(node)] = ops.parents {
            grads.register::<B>(node.id, ops.state);
        }
    }
}

/// Gradients of the inputs of `y`, given its gradient `dy`. `root` has one element.
fn backward<B: Backend>(y: FloatTensor<Autodiff<B>>, dy: FloatTensor<B>, root: FloatTensor<B>) -> Gradients {
    let root: FloatTensor<Autodiff<B>> = match Given.prepare::<NoCheckpointing>([y.node]).compute_bound().stateful() {
        OpsKind::Tracked(prep) => prep.finish(dy, root),
        OpsKind::UnTracked(prep) => prep.finish(root),
    };
    root.backward()
}

/// Random x `[M, K]`, w `[K, N]`, dy `[M, N]`, and the one-element root of backward.
pub fn inputs<B: Backend>([m, k, n]: [usize; 3], dtype: DType) -> [FloatTensor<B>; 4] {
    [([m, k], 1.0), ([k, n], 0.02), ([m, n], 1.0), ([1, 1], 1.0)].map(|(shape, deviation)| {
        let tensor = Tensor::<B, 2>::random(shape, Distribution::Normal(0.0, deviation), &Default::default());
        tensor.cast(dtype).into_primitive().tensor()
    })
}

/// Forward and backward in high precision.
pub fn plain_step<B: Backend>([x, w, dy, root]: [FloatTensor<B>; 4]) {
    step::<Autodiff<B>>([x, w], |y| backward(y, dy, root));
}

/// Forward and backward with the device's default configuration. The tensors are new to the
/// decorator, so nothing is cast yet.
pub fn float8_step<B: Float8Backend>([x, w, dy, root]: [FloatTensor<B>; 4]) {
    step::<Float8<Autodiff<B>>>([x, w].map(Float8Tensor::new), |y| backward(y.into_full(), dy, root));
}

/// Forward of x and w, and their gradients by `backward`.
fn step<B: AutodiffBackend<Gradients = Gradients>>(
    inputs: [FloatTensor<B::InnerBackend>; 2],
    backward: impl FnOnce(FloatTensor<B>) -> Gradients,
) {
    let new = |input| Tensor::<B, 2>::from_inner(Tensor::from_primitive(TensorPrimitive::Float(input))).require_grad();
    let [x, w] = inputs.map(new);
    let grads = backward(linear(x.clone(), w.clone(), None).into_primitive().tensor());
    drop((x.grad(&grads).expect("x is tracked"), w.grad(&grads).expect("w is tracked")));
}
