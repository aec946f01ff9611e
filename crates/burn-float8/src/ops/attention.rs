//! Burn's scaled dot-product attention. Runs as the node of [`Fused::Attention`] if possible.
use burn_backend::ops::AttentionModuleOptions;
use burn_backend::tensor::{BoolTensor, FloatTensor};
use burn_backend::{DType, TensorMetadata};
use burn_std::Shape;

use crate::backend::{Attention, Fused};
use crate::profile::operation;
use crate::tensor::Wrapped;

/// Attention by the node, or by the inner backend for unsupported cases such as f64 or a gradient
/// of the bias.
pub(super) fn attention<W: Wrapped>(
    [query, key, value]: [FloatTensor<W>; 3],
    mask: Option<BoolTensor<W>>,
    bias: Option<FloatTensor<W>>,
    options: AttentionModuleOptions,
) -> FloatTensor<W> {
    let spread = [mask.as_ref().map(TensorMetadata::shape), bias.as_ref().map(TensorMetadata::shape)];
    let has_bias_gradient = bias.as_ref().is_some_and(W::is_tracked);
    if fits::<W>([&query, &key, &value], spread, &options) && !has_bias_gradient {
        let bias = bias.map(|bias| W::plain(&bias).clone());
        let attention = Attention { mask, bias, documents: None, options };
        return W::fused_node(Fused::Attention(attention), vec![query, key, value]);
    }
    let _timer = operation("attention");
    W::attention(query, key, value, mask, bias, options)
}

/// Whether the node supports these shapes and dtypes; `spread` holds the shapes of mask and bias.
/// The inner backend handles or refuses all others.
fn fits<W: Wrapped>(
    [query, key, value]: [&FloatTensor<W>; 3],
    spread: [Option<Shape>; 2],
    options: &AttentionModuleOptions,
) -> bool {
    let [batch, heads, queries, dim] = query.shape().dims();
    let [_, kv_heads, keys, _] = key.shape().dims();
    let [.., width] = value.shape().dims::<4>();
    let scores = [batch, heads, queries, keys];
    let spreads = |shape: Shape| shape.dims::<4>().iter().zip(scores).all(|(&own, all)| own == 1 || own == all);
    let dtype = query.dtype();
    [batch, heads, queries, dim, keys, width].iter().all(|&size| size > 0)
        && key.shape().dims() == [batch, kv_heads, keys, dim]
        && value.shape().dims() == [batch, kv_heads, keys, width]
        && kv_heads > 0
        && heads.is_multiple_of(kv_heads)
        && matches!(dtype, DType::F32 | DType::F16 | DType::BF16)
        && [key.dtype(), value.dtype()] == [dtype; 2]
        && spread.into_iter().flatten().all(spreads)
        && options.softcap.is_none_or(|cap| cap > 0.0)
}
