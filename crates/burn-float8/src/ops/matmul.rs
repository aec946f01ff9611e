//! `Tensor::matmul` where a linear's weight is involved: in FP8 if the layer's configuration says so, else noted.
//!
//! Burn differentiates a matmul by two more of them, and these are the GEMMs of a linear:
//!
//! ```text
//! y  = x · w         w a weight                        fprop
//! dx = dy · wᵀ       the transpose of that weight      dgrad
//! dw = xᵀ · dy       the transpose of its x             wgrad
//! ```
use burn_backend::TensorMetadata;
use burn_backend::tensor::FloatTensor;

use super::linear;
use crate::backend::Float8Backend;
use crate::error::Float8Error;
use crate::profile::operation;
use crate::tensor::{Float8Tensor, LinearUse};

pub(super) fn matmul<B: Float8Backend>(lhs: Float8Tensor<B>, rhs: Float8Tensor<B>) -> Float8Tensor<B> {
    if lhs.rank() == 2 && rhs.rank() == 2 {
        let (l, r) = (lhs.shape(), rhs.shape());
        if rhs.transpose_of().is_some_and(|w| l[1] == r[0] && is_saved_weight(w, Some(l[0]))) {
            let w = rhs.into_transpose_of().expect("it is one");
            return linear::dgrad(w, lhs);
        }
        if lhs.transpose_of().is_some_and(|x| l[1] == r[0] && is_saved_input(x, [l[0], r[1]])) {
            let x = lhs.into_transpose_of().expect("it is one");
            return linear::wgrad(x, rhs);
        }
        if rhs.transpose_of().is_none() && l[1] == r[0] && rhs.layer().is_some_and(|layer| layer.has_matmul()) {
            return linear::forward(lhs, rhs, None);
        }
    }
    for layer in [lhs.layer(), rhs.layer()].into_iter().flatten() {
        layer.count_weight_matmul();
    }
    if let Some(layer) = [&lhs, &rhs].into_iter().find_map(Float8Tensor::divided) {
        panic!("{}", Float8Error::ShardedMatmul { layer: layer.name().into() });
    }
    let _timer = operation("float_matmul");
    Float8Tensor::new(B::float_matmul(lhs.into_full(), rhs.into_full()))
}

pub(super) fn transpose<B: Float8Backend>(t: Float8Tensor<B>) -> Float8Tensor<B> {
    transposed(t, "float_transpose", B::float_transpose)
}

pub(super) fn swap_dims<B: Float8Backend>(t: Float8Tensor<B>, dim1: usize, dim2: usize) -> Float8Tensor<B> {
    transposed(t, "float_swap_dims", |t| B::float_swap_dims(t, dim1, dim2))
}

/// The result of swapping axes, which remembers `t` where a matmul in FP8 may want it.
fn transposed<B: Float8Backend>(
    t: Float8Tensor<B>,
    name: &'static str,
    swap: impl FnOnce(FloatTensor<B>) -> FloatTensor<B>,
) -> Float8Tensor<B> {
    let _timer = operation(name);
    if t.rank() == 2 && (is_saved_weight(&t, None) || is_saved_for(&t, |_| true)) {
        return Float8Tensor::transposed(swap(t.full().clone()), t);
    }
    let mark = t.mark().cloned();
    Float8Tensor::new(swap(t.into_full())).with_mark(mark)
}

/// Whether this is what Autodiff saved of a weight for the backward of a matmul in FP8, of so many rows; a transpose in forward is
/// not.
fn is_saved_weight<B: Float8Backend>(w: &Float8Tensor<B>, rows: Option<usize>) -> bool {
    w.layer().is_some_and(|layer| layer.has_matmul()) && w.is_before_dgrad(rows)
}

/// Whether a weight of this shape, whose matmuls run in FP8, has read x, and Autodiff has saved x for its gradient, which is still
/// to come. What it saved cannot be told from what the program holds, since other operations save x too.
fn is_saved_input<B: Float8Backend>(x: &Float8Tensor<B>, weight_shape: [usize; 2]) -> bool {
    is_saved_for(x, |used| used.weight_shape == weight_shape)
}

fn is_saved_for<B: Float8Backend>(x: &Float8Tensor<B>, fits: impl Fn(&LinearUse<B>) -> bool) -> bool {
    let waits = |used: &LinearUse<B>| used.pending && used.saved.is_some() && fits(used) && used.layer.has_matmul();
    x.known_cache().is_some_and(|cache| cache.with_uses(|uses| uses.iter().any(waits)))
}
