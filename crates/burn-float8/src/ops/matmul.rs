//! `Tensor::matmul` with a linear's weight: in FP8 if the layer's configuration enables it,
//! otherwise counted.
use burn_backend::TensorMetadata;
use burn_backend::ops::ModuleOps;

use super::Float8;
use crate::profile::operation;
use crate::tensor::{Float8Tensor, Wrapped};

pub(super) fn matmul<W: Wrapped>(lhs: Float8Tensor<W>, rhs: Float8Tensor<W>) -> Float8Tensor<W> {
    let has_matmul = rhs.layer().is_some_and(|layer| layer.has_matmul());
    if has_matmul && lhs.rank() == 2 && rhs.rank() == 2 && lhs.shape()[1] == rhs.shape()[0] {
        return <Float8<W> as ModuleOps<Float8<W>>>::linear(lhs, rhs, None);
    }
    for layer in [lhs.layer(), rhs.layer()].into_iter().flatten() {
        layer.count_weight_matmul();
    }
    if let Some(layer) = [&lhs, &rhs].into_iter().find_map(Float8Tensor::divided) {
        let layer = layer.name();
        panic!(
            "{layer}: ranks divide its weight, and Tensor::matmul would read this rank's part of it, or of its gradient, as a whole matrix. \
             A sharded weight that is used without nn::Linear or nn::Embedding, such as a tied output, is to go through \
             float8_shard::full_tensor; an optimizer that multiplies gradients, such as Muon, does not work on parts"
        );
    }
    let _timer = operation("float_matmul");
    Float8Tensor::new(W::float_matmul(lhs.into_values("float_matmul"), rhs.into_values("float_matmul")))
}
