//! Backward from a given gradient, like `torch.autograd.grad(y, inputs, dy)`.
//!
//! Burn's backward starts from ones. Here that is a tensor of one element, made by a node that
//! passes dy on.

use burn::backend::Autodiff;
use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::checkpoint::strategy::NoCheckpointing;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind};
use burn::tensor::backend::Backend;
use burn::tensor::ops::FloatTensor;

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
pub fn backward<B: Backend>(y: FloatTensor<Autodiff<B>>, dy: FloatTensor<B>, root: FloatTensor<B>) -> Gradients {
    let root: FloatTensor<Autodiff<B>> = match Given.prepare::<NoCheckpointing>([y.node]).compute_bound().stateful() {
        OpsKind::Tracked(prep) => prep.finish(dy, root),
        OpsKind::UnTracked(prep) => prep.finish(root),
    };
    root.backward()
}
