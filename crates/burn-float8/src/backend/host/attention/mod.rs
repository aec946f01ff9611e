//! [`Float8Backend::attention_forward`](super::Float8Backend::attention_forward) on the host.
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
use crate::backend::attention::{Attention, AttentionOutput, CachedAttention, scale};

/// [`Float8Backend::attention_forward`](super::Float8Backend::attention_forward) on the host.
pub fn attention_forward<B: Backend>(attention: &Attention<B>) -> AttentionOutput<B> {
    let sizes = sizes(attention);
    let [q, k, v] = [&attention.query, &attention.key, &attention.value].map(View::new::<B>);
    let (y, lse) = with_scores(attention, |scores| kernel::forward(sizes, [&q, &k, &v], scores));
    let Sizes { batch, heads, queries, value_dim, .. } = sizes;
    AttentionOutput {
        y: tensor_on::<B>(&attention.query, y, [batch, heads, queries, value_dim], attention.query.dtype()),
        log_sums: Some(tensor_on::<B>(&attention.query, lse, [batch, heads, queries, 1], DType::F32)),
    }
}

/// [`Float8Backend::cached_attention`](super::Float8Backend::cached_attention) on the host.
pub fn cached_attention<B: Backend>(attention: &CachedAttention<B>) -> Option<FloatTensor<B>> {
    let CachedAttention { query, key, value, head_dim, hidden, options } = attention;
    let [batch, heads, queries, dim] = query.shape().dims();
    let [_, kv_heads, keys] = key.dims();
    let sizes = Sizes { batch, heads, kv_heads, queries, keys, dim, value_dim: *head_dim };
    let kept = [key, value].map(|heads| Kept::new(heads, query.dtype()));
    let hidden = hidden.as_ref().map(|hidden| bools::<B>(hidden));
    let scores = Scores {
        scale: scale(query, options) as f32,
        softcap: options.softcap.map(|cap| cap as f32),
        is_causal: options.is_causal,
        mask: hidden.as_ref().map(|values| (&values[..], [keys, 0, 0, 1])),
        bias: None,
        documents: None,
    };
    let y = cached::forward(sizes, &View::new::<B>(query), kept.each_ref(), &scores);
    Some(tensor_on::<B>(query, y, [batch, heads, queries, sizes.value_dim], query.dtype()))
}

/// [`Float8Backend::attention_backward`](super::Float8Backend::attention_backward) on the host.
pub fn attention_backward<B: Backend>(
    attention: &Attention<B>,
    saved: Option<(FloatTensor<B>, FloatTensor<B>)>,
    dy: FloatTensor<B>,
) -> [FloatTensor<B>; 3] {
    let sizes = sizes(attention);
    let inputs = [&attention.query, &attention.key, &attention.value];
    let [q, k, v] = inputs.map(View::new::<B>);
    let (y, lse) = saved.expect("forward on the host gives them");
    let output = Output { y: &floats::<B>(&y), lse: &floats::<B>(&lse), dy: View::new::<B>(&dy) };
    let gradients = with_scores(attention, |scores| kernel::backward(sizes, [&q, &k, &v], scores, &output));
    let mut gradients = gradients
        .into_iter()
        .zip(inputs)
        .map(|(gradient, input)| tensor_on::<B>(input, gradient, input.shape(), input.dtype()));
    std::array::from_fn(|_| gradients.next().expect("three"))
}

fn sizes<B: Backend>(attention: &Attention<B>) -> Sizes {
    let [batch, heads, queries, dim] = attention.query.shape().dims();
    let [_, kv_heads, keys, value_dim] = attention.value.shape().dims();
    Sizes { batch, heads, kv_heads, queries, keys, dim, value_dim }
}

/// Reads what hides and changes scores, for as long as `run` takes.
fn with_scores<B: Backend, T>(attention: &Attention<B>, run: impl FnOnce(&Scores<'_>) -> T) -> T {
    let mask = attention.mask.as_ref().map(|mask| (bools::<B>(mask), shared_strides(&mask.shape())));
    let bias = attention.bias.as_ref().map(|bias| (floats::<B>(bias), shared_strides(&bias.shape())));
    let documents = attention.documents.as_ref().map(read_ints::<B>);
    run(&Scores {
        scale: attention.scale() as f32,
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

/// Strides of a tensor that lies row by row; 0 along what has one element, which all share.
fn shared_strides(shape: &Shape) -> [usize; 4] {
    let dims: [usize; 4] = shape.dims();
    std::array::from_fn(|axis| if dims[axis] == 1 { 0 } else { dims[axis + 1..].iter().product() })
}
