//! Scaled dot-product attention whose memory is linear in the number of positions: [`Attention`],
//! and an implementation in blocks of queries for backends without a kernel.
//!
//! ```text
//! S = mask(softcap(scale · q kᵀ)) + bias        P = softmax(S)        y = P v
//! dP = dy vᵀ        dS = P ∘ (dP - Σ P ∘ dP) · softcap' · scale
//! dq = dS k         dk = dSᵀ q        dv = Pᵀ dy
//! ```
//! Backward recomputes P. Scores and P are f32; products have the dtype of q.

use core::ops::Range;

use burn::tensor::{Bool, Int, Tensor, TensorPrimitive};
use burn_backend::ops::AttentionModuleOptions;
use burn_backend::tensor::{BoolTensor, FloatTensor, IntTensor};
use burn_backend::{Backend, DType, TensorMetadata};
use burn_std::Shape;

/// Maximum number of scores in memory at a time: 64 MiB.
const SCORES: usize = 1 << 24;
/// Value of a hidden score: WGSL need not represent infinities.
const HIDDEN: f32 = -1e30;

/// Settings and masks of attention.
#[derive(Clone, Debug)]
pub struct Attention<B: Backend> {
    /// `[B, H, T, S]`, each axis 1 to broadcast. True hides a key.
    pub mask: Option<BoolTensor<B>>,
    /// `[B, H, T, S]`, each axis 1 to broadcast. Added to scores; gets no gradient.
    pub bias: Option<FloatTensor<B>>,
    /// `[B, S]` document ids, where T = S. A position sees only positions with the same id.
    pub documents: Option<IntTensor<B>>,
    /// Scale, softcap, and causality: whether query `t` sees only keys up to `t + S - T`.
    pub options: AttentionModuleOptions,
}

/// Factor applied to q · kᵀ: `1/√d` unless the options set it.
pub(super) fn scale(query: &Shape, options: &AttentionModuleOptions) -> f64 {
    let [.., dim] = query.dims::<4>();
    options.scale.unwrap_or_else(|| (dim as f64).sqrt().recip())
}

/// Keys or values in a KV cache.
#[derive(Clone, Debug)]
pub enum CachedHeads<B: Backend> {
    /// `[B, KV, S, d]`, in any dtype.
    Float(FloatTensor<B>),
    /// FP8 with one scale per head and position: `value = code · inv_scale`.
    E4m3 {
        /// Four codes per 32-bit word, the first in its lowest byte: `[B, KV, S, ⌈d / 4⌉]`.
        codes: IntTensor<B>,
        /// `[B, KV, S, 1]`, f32.
        inv_scales: FloatTensor<B>,
    },
}

impl<B: Backend> CachedHeads<B> {
    /// B, KV and S.
    pub fn dims(&self) -> [usize; 3] {
        let [batch, heads, positions, _] = match self {
            Self::Float(values) => values.shape().dims(),
            Self::E4m3 { inv_scales, .. } => inv_scales.shape().dims(),
        };
        [batch, heads, positions]
    }
}

/// Inputs of attention between new tokens and a KV cache.
#[derive(Clone, Debug)]
pub struct CachedAttention<B: Backend> {
    /// `[B, H, T, d]`.
    pub query: FloatTensor<B>,
    /// S positions of KV heads. Each serves `H / KV` query heads.
    pub key: CachedHeads<B>,
    /// Values of the same positions.
    pub value: CachedHeads<B>,
    /// Elements of one value head.
    pub head_dim: usize,
    /// `[B, S]`: true hides a key from all queries of its sequence.
    pub hidden: Option<BoolTensor<B>>,
    /// Scale, softcap, and causality: whether query `t` sees only keys up to `t + S - T`.
    pub options: AttentionModuleOptions,
}

/// Forward on any backend.
pub(super) fn forward<B: Backend>(attention: &Attention<B>, inputs: [&FloatTensor<B>; 3]) -> FloatTensor<B> {
    QueryBlocks::new(attention, inputs, rows::<B>(inputs)).forward().into_primitive().tensor()
}

/// Gradients of q, k and v on any backend.
pub(super) fn backward<B: Backend>(
    attention: &Attention<B>,
    inputs: [&FloatTensor<B>; 3],
    dy: &FloatTensor<B>,
) -> [FloatTensor<B>; 3] {
    let gradients = QueryBlocks::new(attention, inputs, rows::<B>(inputs)).backward(float(dy.clone()));
    gradients.map(|gradient| gradient.into_primitive().tensor())
}

/// Number of queries per block, a multiple of the GEMM tile.
fn rows<B: Backend>([query, key, _]: [&FloatTensor<B>; 3]) -> usize {
    let [batch, heads, ..] = query.shape().dims::<4>();
    let [_, _, keys, _] = key.shape().dims::<4>();
    (SCORES / (batch * heads * keys) / 16 * 16).max(16)
}

fn float<B: Backend, const D: usize>(tensor: FloatTensor<B>) -> Tensor<B, D> {
    Tensor::from_primitive(TensorPrimitive::Float(tensor))
}

/// Inputs of attention, split into blocks of queries.
struct QueryBlocks<'a, B: Backend> {
    attention: &'a Attention<B>,
    query: Tensor<B, 4>,
    key: Tensor<B, 4>,
    value: Tensor<B, 4>,
    mask: Option<Tensor<B, 4, Bool>>,
    bias: Option<Tensor<B, 4>>,
    documents: Option<Tensor<B, 2, Int>>,
    /// Last key that each query sees, and the indices of all keys. None without a causal mask.
    causal: Option<[Tensor<B, 1, Int>; 2]>,
    rows: usize,
}

/// A block of queries of all heads. Queries of one key head are rows of one matrix,
/// `[B, KV, H/KV · rows, ..]`.
struct Block<B: Backend> {
    query: Tensor<B, 4>,
    /// Keys seen by at least one query of the block.
    key: Tensor<B, 4>,
    value: Tensor<B, 4>,
    /// f32.
    probabilities: Tensor<B, 4>,
    /// Derivative of softcap.
    slope: Option<Tensor<B, 4>>,
}

impl<'a, B: Backend> QueryBlocks<'a, B> {
    fn new(attention: &'a Attention<B>, inputs: [&FloatTensor<B>; 3], rows: usize) -> Self {
        let [query, key, value] = inputs.map(|input| float::<B, 4>(input.clone()));
        let causal = attention.options.is_causal.then(|| {
            let [queries, keys] = [&query, &key].map(|t| t.dims()[2] as i64);
            [keys - queries..keys, 0..keys].map(|numbers| Tensor::arange(numbers, &query.device()))
        });
        Self {
            attention,
            query,
            key,
            value,
            mask: attention.mask.clone().map(Tensor::from_primitive),
            bias: attention.bias.clone().map(float),
            documents: attention.documents.clone().map(Tensor::from_primitive),
            causal,
            rows,
        }
    }

    fn scale(&self) -> f64 {
        scale(&self.query.shape(), &self.attention.options)
    }

    /// `[B, H, T, e]`.
    fn forward(&self) -> Tensor<B, 4> {
        let y = self.ranges().map(|queries| {
            let block = self.scores(queries);
            let y = block.probabilities.cast(self.query.dtype()).matmul(block.value);
            self.apart(y)
        });
        Tensor::cat(y.collect(), 2)
    }

    /// Gradients of q, k and v.
    fn backward(&self, dy: Tensor<B, 4>) -> [Tensor<B, 4>; 3] {
        let (k, v, dtype) = (&self.key, &self.value, self.query.dtype());
        let [mut dk, mut dv] = [k, v].map(|t| t.zeros_like().cast(DType::F32));
        let dq = self.ranges().map(|queries| {
            // In this order, fusion writes neither P nor dP to memory a second time in another
            // dtype.
            let Block { query, key, value, probabilities: p, slope } = self.scores(queries.clone());
            let narrow = p.clone().cast(dtype);
            let dy = self.together(dy.clone().slice_dim(2, queries));
            let seen = key.dims()[2];
            let dp = dy.clone().matmul(value.transpose());
            let delta = (p.clone() * dp.clone().cast(DType::F32)).sum_dim(3);
            let ds = p * (dp.cast(DType::F32) - delta);
            let ds = slope.into_iter().fold(ds, |ds, slope| ds * slope);
            let ds = ds.mul_scalar(self.scale()).cast(dtype);
            let add = |sum: &mut Tensor<B, 4>, part: Tensor<B, 4>| {
                let all = sum.clone().slice_dim(2, 0..seen) + part.cast(DType::F32);
                let [batch, heads, _, width] = sum.dims();
                // Take the only handle. Otherwise Burn would copy the whole tensor.
                let whole = core::mem::replace(sum, all.clone());
                *sum = whole.slice_assign([0..batch, 0..heads, 0..seen, 0..width], all);
            };
            add(&mut dk, ds.clone().transpose().matmul(query));
            add(&mut dv, narrow.transpose().matmul(dy));
            self.apart(ds.matmul(key))
        });
        let dq = Tensor::cat(dq.collect(), 2);
        [dq, dk.cast(dtype), dv.cast(dtype)]
    }

    fn ranges(&self) -> impl Iterator<Item = Range<usize>> + use<B> {
        let (queries, rows) = (self.query.dims()[2], self.rows);
        (0..queries).step_by(rows).map(move |start| start..(start + rows).min(queries))
    }

    /// `[B, H, rows, _]` → `[B, KV, H/KV · rows, _]`.
    fn together(&self, x: Tensor<B, 4>) -> Tensor<B, 4> {
        let ([batch, heads, rows, width], kv_heads) = (x.dims(), self.key.dims()[1]);
        x.reshape([batch, kv_heads, heads / kv_heads * rows, width])
    }

    /// `[B, KV, H/KV · rows, _]` → `[B, H, rows, _]`.
    fn apart(&self, x: Tensor<B, 4>) -> Tensor<B, 4> {
        let ([batch, kv_heads, rows, width], heads) = (x.dims(), self.query.dims()[1]);
        x.reshape([batch, heads, kv_heads * rows / heads, width])
    }

    fn scores(&self, queries: Range<usize>) -> Block<B> {
        let options = &self.attention.options;
        let ([.., all_queries, _], [.., all_keys, _]) = (self.query.dims(), self.key.dims());
        // A causal mask ends at the last query's last key.
        let seen = match options.is_causal {
            true => (queries.end + all_keys).saturating_sub(all_queries).clamp(1, all_keys),
            false => all_keys,
        };
        let query = self.together(self.query.clone().slice_dim(2, queries.clone()));
        let [key, value] = [&self.key, &self.value].map(|t| t.clone().slice_dim(2, 0..seen));
        let scores = query.clone().matmul(key.clone().transpose()).cast(DType::F32);
        let scores = scores.mul_scalar(self.scale());
        let (scores, slope) = match options.softcap {
            None => (scores, None),
            Some(cap) => {
                let tanh = scores.div_scalar(cap).tanh();
                (tanh.clone().mul_scalar(cap), Some(tanh.square().neg().add_scalar(1.0)))
            }
        };
        let mut scores = self.apart(scores);
        let hide = |scores: Tensor<B, 4>, mask: Tensor<B, 4, Bool>| {
            let shape = scores.shape();
            scores.mask_fill(mask.expand(shape), HIDDEN)
        };
        if let Some(mask) = &self.mask {
            scores = hide(scores, part(mask.clone(), queries.clone(), seen));
        }
        if let Some([last, keys]) = self.causal.clone() {
            let last = last.slice_dim(0, queries.clone()).reshape([1, 1, queries.len(), 1]);
            let keys = keys.slice_dim(0, 0..seen).reshape([1, 1, 1, seen]);
            let shape = [1, 1, queries.len(), seen];
            scores = hide(scores, last.expand(shape).lower(keys.expand(shape)));
        }
        if let Some(documents) = &self.documents {
            let batch = documents.dims()[0];
            let own = documents.clone().slice_dim(1, queries.clone()).reshape([batch, 1, queries.len(), 1]);
            let other = documents.clone().slice_dim(1, 0..seen).reshape([batch, 1, 1, seen]);
            let shape = [batch, 1, queries.len(), seen];
            scores = hide(scores, own.expand(shape).not_equal(other.expand(shape)));
        }
        if let Some(bias) = &self.bias {
            scores = scores + part(bias.clone(), queries, seen).cast(DType::F32);
        }
        // If all keys are hidden, exp(HIDDEN - HIDDEN / 10) is 0, and 0 / MIN_POSITIVE is 0.
        let max = scores.clone().max_dim(3).clamp_min(HIDDEN / 10.0);
        let weights = (scores - max).exp();
        let sums = weights.clone().sum_dim(3).clamp_min(f32::MIN_POSITIVE);
        Block { query, key, value, probabilities: self.together(weights / sums), slope }
    }
}

/// Slice of queries and first keys. Axes of size 1 broadcast and stay.
fn part<B: Backend, K: burn::tensor::BasicOps<B>>(
    t: Tensor<B, 4, K>,
    queries: Range<usize>,
    seen: usize,
) -> Tensor<B, 4, K> {
    let [.., rows, keys] = t.dims();
    let t = if rows == 1 { t } else { t.slice_dim(2, queries) };
    if keys == 1 { t } else { t.slice_dim(3, 0..seen) }
}

#[cfg(all(test, feature = "flex"))]
mod tests {
    use burn_backend::TensorData;
    use burn_backend::ops::FloatTensorOps;
    use burn_flex::Flex;

    use super::*;
    use crate::backend::{Float8Backend, Fused, FusedBackward};

    /// Blocks of any height match the host kernel.
    #[test]
    fn blocks_are_the_whole() {
        let device = Default::default();
        // Values of both signs, so that gradients are not small differences.
        let values = |seed: usize, shape: [usize; 4]| {
            let value = |i: usize| ((i * 7919 + seed * 104_729) % 2003) as f32 / 600.0 - 1.67;
            let values: Vec<f32> = (0..shape.iter().product()).map(value).collect();
            Flex::float_from_data(TensorData::new(values, shape), &device)
        };
        let options = |is_causal, softcap| AttentionModuleOptions { scale: None, softcap, is_causal };
        for (queries, keys, options, has_documents) in [
            (50, 50, options(true, None), true),
            (40, 70, options(true, Some(0.8)), false),
            (70, 40, options(true, None), false),
            (33, 20, options(false, None), false),
        ] {
            let documents = has_documents.then(|| {
                let ids: Vec<i64> = (0..2 * keys as i64).map(|i| i % 50 / 20).collect();
                Tensor::<Flex, 2, Int>::from_data(TensorData::new(ids, [2, keys]), &device).into_primitive()
            });
            let mask = (!has_documents).then(|| {
                let hidden: Vec<bool> = (0..queries * keys).map(|i| i % 7 == 2).collect();
                Tensor::<Flex, 4, Bool>::from_data(TensorData::new(hidden, [1, 1, queries, keys]), &device)
                    .into_primitive()
            });
            let inputs = [values(1, [2, 6, queries, 8]), values(2, [2, 3, keys, 8]), values(3, [2, 3, keys, 5])];
            let bias = Some(values(4, [1, 6, queries, keys]));
            let attention = Attention { mask, bias, documents, options };
            let op = Fused::Attention(attention.clone());
            let dy = values(5, [2, 6, queries, 5]);
            let outputs = Flex::fused(&op, &inputs, None);
            let gradients = Flex::fused(&op, &inputs, Some(&FusedBackward { outputs: &outputs, dy: &dy }));
            let want: Vec<_> = outputs[..1].iter().chain(&gradients).cloned().map(float::<Flex, 4>).collect();
            for rows in [16, 17, 1000] {
                let blocks = QueryBlocks::new(&attention, inputs.each_ref(), rows);
                let [dq, dk, dv] = blocks.backward(float(dy.clone()));
                for (got, want) in [blocks.forward(), dq, dk, dv].into_iter().zip(&want) {
                    let error = (got - want.clone()).abs().max().into_scalar();
                    let largest = want.clone().abs().max().into_scalar();
                    assert!(error <= 1e-5 * largest, "{queries} by {keys}, {rows} rows: {error:e} of {largest:e}");
                }
            }
        }
    }
}
