//! [`attention`] with grouped key heads and document masks, [`attention_but`] with hidden keys, and
//! [`cached_attention`] over a KV cache.
use burn::tensor::backend::Backend;
use burn::tensor::ops::AttentionModuleOptions;
use burn::tensor::{Bool, DType, Int, Tensor, TensorPrimitive, module};

use crate::backend::{Attention, CachedAttention, CachedHeads, Fused};
use crate::ops::functions::find;

/// Scaled dot-product attention `[B, H, T, e]` of query `[B, H, T, d]`, key `[B, KV, S, d]` and
/// value `[B, KV, S, e]`. Each key head serves `H / KV` consecutive query heads. With
/// `documents: [B, T]`, where T = S, a position sees only positions with the same document id.
///
/// Computes `softmax(softcap(scale · q kᵀ)) v` in high precision, with `options` as in
/// [`burn::tensor::module::attention`]. Products have the dtype of the inputs, softmax is f32.
/// Sources: [Vaswani et al., 2017](https://arxiv.org/abs/1706.03762),
/// [Dao, 2023](https://arxiv.org/abs/2307.08691).
///
/// On [`Float8`](crate::Float8) it is one autodiff node whose memory grows with T instead of T²,
/// since backward recomputes the scores. Burn's function uses the same node unless it needs a
/// gradient of a bias. This function needs no copies of keys and no `[T, T]` mask. On other
/// backends it repeats keys and calls Burn's function.
///
/// ```
/// # #[cfg(feature = "flex")] {
/// use burn::backend::{Autodiff, Flex};
/// use burn::tensor::ops::AttentionModuleOptions;
/// use burn::tensor::{Distribution, Tensor};
/// type B = burn_float8::Float8<Autodiff<Flex>>;
///
/// let device = Default::default();
/// let random = |heads| Tensor::<B, 4>::random([1, heads, 10, 8], Distribution::Default, &device).require_grad();
/// // Four query heads, two of keys and values.
/// let (q, k, v) = (random(4), random(2), random(2));
/// let options = AttentionModuleOptions { is_causal: true, ..Default::default() };
/// let y = burn_float8::nn::attention(q, k.clone(), v, None, options);
/// assert_eq!(y.dims(), [1, 4, 10, 8]);
/// assert_eq!(k.grad(&y.sum().backward()).unwrap().dims(), [1, 2, 10, 8]);
/// # }
/// ```
///
/// # Panics
///
/// If the shapes do not match.
pub fn attention<B: Backend>(
    query: Tensor<B, 4>,
    key: Tensor<B, 4>,
    value: Tensor<B, 4>,
    documents: Option<Tensor<B, 2, Int>>,
    options: AttentionModuleOptions,
) -> Tensor<B, 4> {
    let of_documents = documents.as_ref().map(|documents| documents.dims());
    check_attention([query.dims(), key.dims(), value.dims()], of_documents);
    let queries = query.dims()[2];
    let mask = |heads| {
        documents.clone().map(|documents| {
            let batch = documents.dims()[0];
            let own = documents.clone().reshape([batch, 1, queries, 1]).expand([batch, heads, queries, queries]);
            own.not_equal(documents.reshape([batch, 1, 1, queries]).expand([batch, heads, queries, queries]))
        })
    };
    let primitive = documents.clone().map(Tensor::into_primitive);
    let attention = Attention { mask: None, bias: None, documents: primitive, options };
    run([query, key, value], attention, mask)
}

/// [`attention`] with hidden keys: `hidden: [B, S]` is true for keys that no query of a sequence
/// sees, such as padding in a batch of generated sequences.
///
/// On a CPU with [`Float8`](crate::Float8), hidden keys before the first or after the last visible
/// one do not change a query's result, bit for bit.
///
/// # Panics
///
/// As [`attention`].
pub fn attention_but<B: Backend>(
    query: Tensor<B, 4>,
    key: Tensor<B, 4>,
    value: Tensor<B, 4>,
    hidden: Tensor<B, 2, Bool>,
    options: AttentionModuleOptions,
) -> Tensor<B, 4> {
    let [[batch, _, queries, _], [_, _, keys, _]] = [query.dims(), key.dims()];
    let shapes = [query.dims(), key.dims(), value.dims()];
    check_attention(shapes, None);
    if hidden.dims() != [batch, keys] {
        refuse_attention(shapes, Some(hidden.dims()));
    }
    let mask = hidden.reshape([batch, 1, 1, keys]);
    let expanded = |heads| Some(mask.clone().expand([batch, heads, queries, keys]));
    let attention = Attention { mask: Some(mask.clone().into_primitive()), bias: None, documents: None, options };
    run([query, key, value], attention, expanded)
}

/// [`attention_but`] over keys and values in a KV cache, in another dtype or in FP8. They are
/// decoded only where they are read. The result is bit-identical to attention over the decoded
/// ones. `head_dim` is the number of elements of a value.
///
/// None if the backend cannot decode them itself. Only [`Float8`](crate::Float8) of a CPU without
/// autodiff can. Otherwise the caller must decode them.
///
/// # Panics
///
/// As [`attention`].
pub fn cached_attention<B: Backend>(
    query: Tensor<B, 4>,
    [key, value]: [CachedHeads<B>; 2],
    head_dim: usize,
    hidden: Option<Tensor<B, 2, Bool>>,
    options: AttentionModuleOptions,
) -> Option<Tensor<B, 4>> {
    let cached_attention = find::<B>().filter(|_| query.dtype() != DType::F64)?.cached_attention?;
    let [key_shape, value_shape] = [(&key, query.dims()[3]), (&value, head_dim)].map(|(heads, width)| {
        let [batch, heads, positions] = heads.dims();
        [batch, heads, positions, width]
    });
    let shapes = [query.dims(), key_shape, value_shape];
    check_attention(shapes, None);
    if let Some(hidden) = hidden.as_ref().filter(|hidden| hidden.dims() != [shapes[0][0], value_shape[2]]) {
        refuse_attention(shapes, Some(hidden.dims()));
    }
    let query = query.into_primitive().tensor();
    let hidden = hidden.map(Tensor::into_primitive);
    let y = cached_attention(CachedAttention { query, key, value, head_dim, hidden, options })?;
    Some(Tensor::from_primitive(TensorPrimitive::Float(y)))
}

/// Attention by the backend's node, else by Burn's function. `mask` builds a mask for a number of
/// heads.
fn run<B: Backend>(
    [query, key, value]: [Tensor<B, 4>; 3],
    attention: Attention<B>,
    mask: impl FnOnce(usize) -> Option<Tensor<B, 4, Bool>>,
) -> Tensor<B, 4> {
    let [[batch, heads, ..], [_, kv_heads, keys, _]] = [query.dims(), key.dims()];
    let is_f64 = query.dtype() == DType::F64;
    if let Some(functions) = find::<B>().filter(|_| !is_f64) {
        let inputs = [query, key, value].map(|t| t.into_primitive().tensor());
        let y = (functions.fused)(Fused::Attention(attention), inputs.into());
        return Tensor::from_primitive(TensorPrimitive::Float(y));
    }
    let [key, value] = [key, value].map(|t| {
        let width = t.dims()[3];
        let each = t.reshape([batch, kv_heads, 1, keys, width]);
        each.expand([batch, kv_heads, heads / kv_heads, keys, width]).reshape([batch, heads, keys, width])
    });
    module::attention(query, key, value, mask(heads), None, attention.options)
}

/// Checks the shapes.
///
/// # Panics
///
/// If the shapes do not match.
fn check_attention([query, key, value]: [[usize; 4]; 3], documents: Option<[usize; 2]>) {
    let ([batch, heads, queries, dim], [_, kv_heads, keys, width]) = (query, value);
    let fits = key == [batch, kv_heads, keys, dim]
        && value[0] == batch
        && ![batch, heads, queries, dim, kv_heads, keys, width].contains(&0)
        && heads.is_multiple_of(kv_heads)
        && documents.is_none_or(|documents| documents == [batch, queries] && queries == keys);
    if !fits {
        refuse_attention([query, key, value], documents);
    }
}

fn refuse_attention([query, key, value]: [[usize; 4]; 3], documents: Option<[usize; 2]>) -> ! {
    panic!(
        "attention of query {query:?}, key {key:?}, value {value:?} and documents {documents:?}: they are [B, H, T, d], [B, KV, S, d], \
         [B, KV, S, e] and, if there are some, [B, T]; H is a multiple of KV, T is S with documents, and none is 0"
    );
}
