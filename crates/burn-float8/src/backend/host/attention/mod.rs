//! [`Fused::Attention`](super::super::Fused::Attention) and attention over a cache, on the host.
mod cached;
mod kernel;
mod product;

use burn_backend::tensor::{BoolTensor, FloatTensor};
use burn_backend::{Backend, DType, TensorMetadata};
use burn_std::Shape;

use self::cached::Kept;
use self::kernel::{Output, Scores, Sizes};
use super::view::View;
use super::{data, floats, read_ints, tensor_on};
use crate::backend::attention::{Attention, CachedAttention, scale};
use crate::backend::fused::FusedBackward;

/// y, and `ln Σ exp S` of each query, `[B, H, T, 1]`.
pub(super) fn forward<B: Backend>(attention: &Attention<B>, inputs: [&FloatTensor<B>; 3]) -> Vec<FloatTensor<B>> {
    let (sizes, query) = (sizes::<B>(inputs), inputs[0]);
    let [q, k, v] = inputs.map(View::new::<B>);
    let (y, lse) = with_scores(attention, query, |scores| kernel::forward(sizes, [&q, &k, &v], scores));
    let Sizes { batch, heads, queries, value_dim, .. } = sizes;
    vec![
        tensor_on::<B>(query, y, [batch, heads, queries, value_dim], query.dtype()),
        tensor_on::<B>(query, lse, [batch, heads, queries, 1], DType::F32),
    ]
}

/// Runs [`Float8Backend::cached_attention`](crate::backend::Float8Backend::cached_attention) on the
/// host.
pub(super) fn cached<B: Backend>(attention: &CachedAttention<B>) -> FloatTensor<B> {
    let CachedAttention { query, key, value, head_dim, hidden, options } = attention;
    let [batch, heads, queries, dim] = query.shape().dims();
    let [_, kv_heads, keys] = key.dims();
    let sizes = Sizes { batch, heads, kv_heads, queries, keys, dim, value_dim: *head_dim };
    let kept = [key, value].map(|heads| Kept::new(heads, query.dtype()));
    let hidden = hidden.as_ref().map(|hidden| bools::<B>(hidden));
    let scores = Scores {
        scale: scale(&query.shape(), options) as f32,
        softcap: options.softcap.map(|cap| cap as f32),
        is_causal: options.is_causal,
        mask: hidden.as_ref().map(|values| (&values[..], [keys, 0, 0, 1])),
        bias: None,
        documents: None,
    };
    let y = cached::forward(sizes, &View::new::<B>(query), kept.each_ref(), &scores);
    tensor_on::<B>(query, y, [batch, heads, queries, sizes.value_dim], query.dtype())
}

/// Gradients of q, k and v.
pub(super) fn backward<B: Backend>(
    attention: &Attention<B>,
    inputs: [&FloatTensor<B>; 3],
    FusedBackward { outputs, dy }: &FusedBackward<'_, B>,
) -> Vec<FloatTensor<B>> {
    let [q, k, v] = inputs.map(View::new::<B>);
    let [y, lse] = outputs else { unreachable!("forward on the host gives both") };
    let output = Output { y: &floats::<B>(y), lse: &floats::<B>(lse), dy: View::new::<B>(dy) };
    let sizes = sizes::<B>(inputs);
    let gradients = with_scores(attention, inputs[0], |scores| kernel::backward(sizes, [&q, &k, &v], scores, &output));
    let gradients = gradients.into_iter().zip(inputs);
    gradients.map(|(gradient, input)| tensor_on::<B>(input, gradient, input.shape(), input.dtype())).collect()
}

fn sizes<B: Backend>([query, _, value]: [&FloatTensor<B>; 3]) -> Sizes {
    let [batch, heads, queries, dim] = query.shape().dims();
    let [_, kv_heads, keys, value_dim] = value.shape().dims();
    Sizes { batch, heads, kv_heads, queries, keys, dim, value_dim }
}

/// Reads mask, bias and documents, and passes them to `run`.
fn with_scores<B: Backend, T>(
    attention: &Attention<B>,
    query: &FloatTensor<B>,
    run: impl FnOnce(&Scores<'_>) -> T,
) -> T {
    let mask = attention.mask.as_ref().map(|mask| (bools::<B>(mask), shared_strides(&mask.shape())));
    let bias = attention.bias.as_ref().map(|bias| (floats::<B>(bias), shared_strides(&bias.shape())));
    let documents = attention.documents.as_ref().map(read_ints::<B>);
    run(&Scores {
        scale: scale(&query.shape(), &attention.options) as f32,
        softcap: attention.options.softcap.map(|cap| cap as f32),
        is_causal: attention.options.is_causal,
        mask: mask.as_ref().map(|(values, strides)| (&values[..], *strides)),
        bias: bias.as_ref().map(|(values, strides)| (&values[..], *strides)),
        documents: documents.as_deref(),
    })
}

fn bools<B: Backend>(mask: &BoolTensor<B>) -> Vec<bool> {
    data(B::bool_into_data(mask.clone())).iter::<bool>().collect()
}

/// Row-major strides, with 0 for axes of size 1, which broadcast.
fn shared_strides(shape: &Shape) -> [usize; 4] {
    let dims: [usize; 4] = shape.dims();
    std::array::from_fn(|axis| if dims[axis] == 1 { 0 } else { dims[axis + 1..].iter().product() })
}
