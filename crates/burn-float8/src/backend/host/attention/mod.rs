//! [`Float8Backend::attention_forward`](super::Float8Backend::attention_forward) on the host.
mod kernel;

use burn_backend::tensor::FloatTensor;
use burn_backend::{Backend, DType, ExecutionError, TensorData, TensorMetadata};
use burn_std::Shape;

use self::kernel::{Output, Scores, Sizes};
use super::view::View;
use super::{floats, in_dtype};
use crate::backend::attention::{Attention, AttentionOutput};

/// [`Float8Backend::attention_forward`](super::Float8Backend::attention_forward) on the host.
pub fn attention_forward<B: Backend>(attention: &Attention<B>) -> AttentionOutput<B> {
    let sizes = sizes(attention);
    let [q, k, v] = [&attention.query, &attention.key, &attention.value].map(View::new::<B>);
    let (y, lse) = with_scores(attention, |scores| kernel::forward(sizes, [&q, &k, &v], scores));
    let Sizes { batch, heads, queries, value_dim, .. } = sizes;
    AttentionOutput {
        y: tensor(attention, y, [batch, heads, queries, value_dim], attention.query.dtype()),
        log_sums: Some(tensor(attention, lse, [batch, heads, queries, 1], DType::F32)),
    }
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
        .map(|(gradient, input)| tensor(attention, gradient, input.shape().dims::<4>(), input.dtype()));
    std::array::from_fn(|_| gradients.next().expect("three"))
}

fn sizes<B: Backend>(attention: &Attention<B>) -> Sizes {
    let [batch, heads, queries, dim] = attention.query.shape().dims();
    let [_, kv_heads, keys, value_dim] = attention.value.shape().dims();
    Sizes { batch, heads, kv_heads, queries, keys, dim, value_dim }
}

/// Reads what hides and changes scores, for as long as `run` takes.
fn with_scores<B: Backend, T>(attention: &Attention<B>, run: impl FnOnce(&Scores<'_>) -> T) -> T {
    let mask = attention.mask.as_ref().map(|mask| {
        (read(B::bool_into_data(mask.clone())).iter::<bool>().collect::<Vec<_>>(), shared_strides(&mask.shape()))
    });
    let bias = attention.bias.as_ref().map(|bias| (floats::<B>(bias), shared_strides(&bias.shape())));
    let documents = attention
        .documents
        .as_ref()
        .map(|documents| read(B::int_into_data(documents.clone())).iter::<i64>().collect::<Vec<_>>());
    run(&Scores {
        scale: attention.scale() as f32,
        softcap: attention.options.softcap.map(|cap| cap as f32),
        is_causal: attention.options.is_causal,
        mask: mask.as_ref().map(|(values, strides)| (&values[..], *strides)),
        bias: bias.as_ref().map(|(values, strides)| (&values[..], *strides)),
        documents: documents.as_deref(),
    })
}

fn read(data: impl Future<Output = Result<TensorData, ExecutionError>>) -> TensorData {
    burn_std::future::block_on(data).expect("a tensor that exists can be read")
}

/// Strides of a tensor that lies row by row; 0 along what has one element, which all share.
fn shared_strides(shape: &Shape) -> [usize; 4] {
    let dims: [usize; 4] = shape.dims();
    std::array::from_fn(|axis| if dims[axis] == 1 { 0 } else { dims[axis + 1..].iter().product() })
}

fn tensor<B: Backend>(like: &Attention<B>, values: Vec<f32>, shape: [usize; 4], dtype: DType) -> FloatTensor<B> {
    let tensor = B::float_from_data(TensorData::new(values, shape), &B::float_device(&like.query));
    in_dtype::<B>(tensor, dtype)
}
