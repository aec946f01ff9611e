//! Output layers that ranks may divide (tensor parallelism).
use burn::tensor::backend::Backend;
use burn::tensor::{Int, Tensor, TensorPrimitive};

use super::log_likelihood;
use crate::ops::functions::find;

/// Number of ranks that divide a linear's or an embedding's weight; 1 without tensor parallelism.
pub fn parallel_ranks<B: Backend>(weight: &Tensor<B, 2>) -> usize {
    find::<B>().map_or(1, |functions| (functions.parallel_ranks)(&weight.clone().into_primitive().tensor()))
}

/// x `[.., T, H]` with the tokens of all ranks, if ranks divide `weight`; else x. For readers of a
/// weight other than `nn::Linear`, such as an output layer that shares the embedding's table. In
/// backward each rank gets the sum of its tokens' gradients.
pub fn parallel_tokens<B: Backend, const D: usize>(x: Tensor<B, D>, weight: &Tensor<B, 2>) -> Tensor<B, D> {
    match find::<B>() {
        Some(functions) => {
            let [x, weight] = [x.into_primitive().tensor(), weight.clone().into_primitive().tensor()];
            Tensor::from_primitive(TensorPrimitive::Float((functions.parallel_tokens)(x, &weight)))
        }
        None => x,
    }
}

/// [`log_likelihood`] of the logits of an output layer. If ranks divide its weight, each has the
/// logits `[M, V / ranks]` of its part of the vocabulary, and all get the likelihoods under the whole
/// vocabulary. No rank has all logits.
///
/// # Panics
///
/// If the numbers of targets and rows differ. With a divided weight, a target outside of the
/// vocabulary does not panic: its likelihood is below -1e38.
pub fn parallel_log_likelihood<B: Backend>(
    logits: Tensor<B, 2>,
    targets: Tensor<B, 1, Int>,
    weight: &Tensor<B, 2>,
) -> Tensor<B, 2> {
    let found = find::<B>().and_then(|functions| {
        let [logits, weight] = [&logits, weight].map(|t| t.clone().into_primitive().tensor());
        (functions.parallel_log_likelihood)(&logits, &targets.clone().into_primitive(), &weight)
    });
    match found {
        Some(y) => Tensor::from_primitive(TensorPrimitive::Float(y)),
        None => log_likelihood(logits, targets),
    }
}
