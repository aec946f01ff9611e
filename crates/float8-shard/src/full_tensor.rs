//! [`full_tensor`]: gathers the whole of a sharded weight, for any backend.
use burn::tensor::backend::Backend;
use burn::tensor::{Tensor, TensorPrimitive};
use burn_float8::shard_hooks;

/// Gathers the whole of a weight `[K, N]` that [`Sharded::apply`](crate::Sharded::apply) has
/// sharded (PyTorch's `DTensor.full_tensor`). Returns any other tensor, and tensors of any other
/// backend, unchanged.
///
/// `nn::Linear` and `nn::Embedding` do not need it. Use it for other readers of a weight, such as
/// an output layer that shares the embedding's table:
///
/// ```
/// use burn::nn::Embedding;
/// use burn::tensor::Tensor;
/// use burn::tensor::backend::Backend;
///
/// /// x `[M, H]` → `[M, V]`
/// fn tied_output<B: Backend>(embedding: &Embedding<B>, x: Tensor<B, 2>) -> Tensor<B, 2> {
///     x.matmul(float8_shard::full_tensor(embedding.weight.val()).transpose())
/// }
/// ```
///
/// Ranks exchange the weight in the dtype of `weight`, so all call it in the same order. In
/// backward each rank gets the sum of its rows' gradient. The whole weight lives as long as its
/// readers. `weight` is the parameter, or the result of element-wise operations or casts on it.
/// Take a transpose of the whole, not of the shard.
///
/// # Panics
///
/// Panics if the shape of `weight` is not the shard's, or if a rank is lost.
pub fn full_tensor<B: Backend>(weight: Tensor<B, 2>) -> Tensor<B, 2> {
    match shard_hooks::full_tensor::<B>() {
        Some(full_tensor) => {
            let whole = full_tensor(weight.into_primitive().tensor());
            Tensor::from_primitive(TensorPrimitive::Float(whole))
        }
        None => weight,
    }
}
