//! [`full_tensor`]: the whole of a shard by name, for any backend.
use burn::tensor::backend::Backend;
use burn::tensor::{Tensor, TensorPrimitive};
use burn_float8::seam;

/// The whole of a weight `[K, N]` that [`Sharded::apply`](crate::Sharded::apply) has divided between ranks (PyTorch's
/// `DTensor.full_tensor`); any other tensor, and on any other backend, is returned as it is.
///
/// `nn::Linear` and `nn::Embedding` need none of it. It is for what else reads a weight, such as an output layer that shares the
/// embedding's table:
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
/// Ranks exchange the weight, in the dtype of `weight`, and in backward its gradient, of which each gets the sum of its rows: all of
/// them call it, in the same order. The whole lives as long as what reads it. `weight` is the parameter, or what an element-wise
/// operation or a cast has made of it; a transpose is taken of the whole.
///
/// # Panics
///
/// If `weight` has not the shape of the shard; if a rank is lost.
pub fn full_tensor<B: Backend>(weight: Tensor<B, 2>) -> Tensor<B, 2> {
    match seam::full_tensor::<B>() {
        Some(full_tensor) => {
            let whole = full_tensor(weight.into_primitive().tensor());
            Tensor::from_primitive(TensorPrimitive::Float(whole))
        }
        None => weight,
    }
}
