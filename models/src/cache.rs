//! [`KvCache`]: keys and values of the positions seen so far, in preallocated memory.
//!
//! ```text
//! row 0    k k k k k . .      . is for positions to come
//! row 1    - - k k k . .      - is hidden padding of a shorter row
//! ```
//! The rows of a batch end at the same position.

use burn::tensor::backend::Backend;
use burn::tensor::ops::AttentionModuleOptions;
use burn::tensor::{BasicOps, Bool, DType, Int, Tensor, TensorData};
use burn_float8::backend::CachedHeads;
use burn_float8::nn::{attention, attention_but, cached_attention};
use trainer::{CacheDtype, CacheOptions, KeyValueCache};

use crate::e4m3;

/// Keys and values of one layer.
#[derive(Clone, Debug)]
pub struct LayerCache<B: Backend> {
    kept: Option<[Kept<B>; 2]>,
    options: CacheOptions,
}

/// Keys or values of one layer, `[B, kv_heads, S, head_dim]`, with capacity S.
#[derive(Clone, Debug)]
enum Kept<B: Backend> {
    Float(Tensor<B, 4>),
    E4m3 {
        /// Four codes per word: `[B, kv_heads, S, head_dim / 4]`.
        codes: Tensor<B, 4, Int>,
        /// Scale of each head of each position, to multiply with: `[B, kv_heads, S, 1]`.
        inv_scales: Tensor<B, 4>,
        head_dim: usize,
    },
}

/// Keys and values of the positions seen so far, for all layers.
#[derive(Clone, Debug)]
pub struct KvCache<B: Backend> {
    pub(crate) layers: Vec<LayerCache<B>>,
    pub(crate) len: usize,
    /// Number of padding positions at the beginning of each row; empty while all rows have the same
    /// length.
    pads: Vec<usize>,
    /// Whether the output layer processes rows one by one.
    pub(crate) rows_alone: bool,
}

impl<B: Backend> KvCache<B> {
    /// An empty cache for a model of `num_layers`.
    pub fn new(num_layers: usize, options: &CacheOptions) -> Self {
        let layer = LayerCache { kept: None, options: *options };
        Self { layers: vec![layer; num_layers], len: 0, pads: vec![], rows_alone: options.rows_alone }
    }

    /// Number of positions of the longest row.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether the cache is empty.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Positions of the next `count` tokens in each row; `None` if all rows have the same length.
    pub(crate) fn next_of_each(&self, count: usize) -> Option<Vec<usize>> {
        let positions = |pad: &usize| self.len - pad..self.len - pad + count;
        (!self.pads.is_empty()).then(|| self.pads.iter().flat_map(positions).collect())
    }

    /// Mask of padding in `0..positions`, `[B, positions]`; `None` if all rows have the same
    /// length.
    pub(crate) fn hidden(&self, positions: usize, device: &B::Device) -> Option<Tensor<B, 2, Bool>> {
        let of_row = |pad: &usize| (0..positions).map(|position| position < *pad).collect::<Vec<_>>();
        let hidden: Vec<bool> = self.pads.iter().flat_map(of_row).collect();
        let data = || TensorData::new(hidden, [self.pads.len(), positions]);
        (!self.pads.is_empty()).then(|| Tensor::from_data(data(), device))
    }
}

impl<B: Backend> KeyValueCache for KvCache<B> {
    /// # Panics
    /// If `rows` is empty, or if a cache belongs to another model or has several rows.
    fn join(rows: Vec<Self>) -> Self {
        let len = rows.iter().map(|row| row.len).max().expect("at least one row");
        let pads: Vec<_> = rows.iter().map(|row| len - row.len).collect();
        let layers = (0..rows[0].layers.len()).map(|layer| {
            let of_rows: Vec<_> = rows.iter().map(|row| (&row.layers[layer], row.len)).collect();
            LayerCache::join(&of_rows, len)
        });
        let pads = if pads.iter().any(|pad| *pad > 0) { pads } else { vec![] };
        Self { layers: layers.collect(), len, pads, rows_alone: rows[0].rows_alone }
    }

    fn keep(&mut self, rows: &[usize]) {
        for [keys, values] in self.layers.iter_mut().filter_map(|layer| layer.kept.as_mut()) {
            [keys, values].into_iter().for_each(|kept| kept.keep(rows));
        }
        if !self.pads.is_empty() {
            self.pads = rows.iter().map(|row| self.pads[*row]).collect();
        }
    }
}

impl<B: Backend> LayerCache<B> {
    /// Appends keys and values, `[B, kv_heads, T, head_dim]`, after the first `past` positions.
    pub(crate) fn append(&mut self, [keys, values]: [Tensor<B, 4>; 2], past: usize) {
        let len = past + keys.dims()[2];
        let CacheOptions { dtype: kept_in, positions, .. } = self.options;
        let with = |old: Option<Kept<B>>, new: Tensor<B, 4>| {
            let kept = match old {
                Some(old) => old.with_room_for(len),
                None => Kept::empty(&new, kept_in, len.max(positions)),
            };
            kept.with(past, new)
        };
        // Takes the tensors out, so that they are not shared and are changed in place.
        let (old_keys, old_values) = self.kept.take().map(|[keys, values]| (keys, values)).unzip();
        self.kept = Some([with(old_keys, keys), with(old_values, values)]);
    }

    /// Attention of query `[B, heads, T, head_dim]` over the first `len` positions, already
    /// appended, except `hidden: [B, len]`. Another storage dtype is decoded during attention, if
    /// the backend supports it.
    pub(crate) fn attention(
        &self,
        query: Tensor<B, 4>,
        len: usize,
        hidden: Option<&Tensor<B, 2, Bool>>,
        options: AttentionModuleOptions,
    ) -> Tensor<B, 4> {
        let kept = self.kept.as_ref().expect("the query's own keys are there").each_ref();
        let (dtype, head_dim) = (query.dtype(), query.dims()[3]);
        let is_plain = kept.iter().all(|kept| matches!(kept, Kept::Float(values) if values.dtype() == dtype));
        let in_place =
            || cached_attention(query.clone(), kept.map(|kept| kept.first(len)), head_dim, hidden.cloned(), options);
        if let Some(y) = (!is_plain).then(in_place).flatten() {
            return y;
        }
        let [keys, values] = kept.map(|kept| kept.read(len, dtype));
        match hidden {
            Some(hidden) => attention_but(query, keys, values, hidden.clone(), options),
            None => attention(query, keys, values, None, options),
        }
    }

    /// Joins the rows of several caches, each with its length, as one batch that ends at `len`.
    fn join(rows: &[(&Self, usize)], len: usize) -> Self {
        let kept = |which: usize| {
            let of_rows = rows.iter().map(|(layer, own)| (layer.kept.as_ref().map(|kept| &kept[which]), *own));
            let capacity = of_rows.clone().filter_map(|(kept, _)| Some(kept?.capacity())).max()?;
            let of_rows = of_rows.map(|(kept, own)| Some((kept?, own))).collect::<Option<Vec<_>>>()?;
            Some(Kept::join(&of_rows, len, capacity.max(len)))
        };
        let kept = [kept(0), kept(1)];
        let kept = if let [Some(keys), Some(values)] = kept { Some([keys, values]) } else { None };
        Self { kept, options: rows[0].0.options }
    }
}

impl<B: Backend> Kept<B> {
    /// Allocates capacity for `positions` positions of tensors like `x`.
    fn empty(x: &Tensor<B, 4>, dtype: Option<CacheDtype>, positions: usize) -> Self {
        let ([batch, heads, _, head_dim], device) = (x.dims(), x.device());
        let zeros = |width, dtype| Tensor::zeros([batch, heads, positions, width], (&device, dtype));
        match dtype {
            None => Self::Float(zeros(head_dim, x.dtype())),
            Some(CacheDtype::F32) => Self::Float(zeros(head_dim, DType::F32)),
            Some(CacheDtype::Bf16) => Self::Float(zeros(head_dim, DType::BF16)),
            Some(CacheDtype::E4m3) => {
                let words = [batch, heads, positions, head_dim.div_ceil(e4m3::CODES)];
                let codes = Tensor::zeros(words, (&device, DType::I32));
                Self::E4m3 { codes, inv_scales: zeros(1, DType::F32), head_dim }
            }
        }
    }

    fn capacity(&self) -> usize {
        self.floats().dims()[2]
    }

    /// Overwrites the positions from `at` on with x.
    fn with(self, at: usize, x: Tensor<B, 4>) -> Self {
        match self {
            Self::Float(values) => {
                let x = x.cast(values.dtype());
                Self::Float(put(values, [0, at], x))
            }
            Self::E4m3 { codes, inv_scales, head_dim } => {
                let (new_codes, new_scales) = e4m3::encode(x);
                let (codes, inv_scales) = (put(codes, [0, at], new_codes), put(inv_scales, [0, at], new_scales));
                Self::E4m3 { codes, inv_scales, head_dim }
            }
        }
    }

    /// First `len` positions in the storage format.
    fn first(&self, len: usize) -> CachedHeads<B> {
        let first = |floats: &Tensor<B, 4>| floats.clone().slice_dim(2, 0..len).into_primitive().tensor();
        match self {
            Self::Float(values) => CachedHeads::Float(first(values)),
            Self::E4m3 { codes, inv_scales, .. } => CachedHeads::E4m3 {
                codes: codes.clone().slice_dim(2, 0..len).into_primitive(),
                inv_scales: first(inv_scales),
            },
        }
    }

    /// Values of the first `len` positions.
    fn read(&self, len: usize, dtype: DType) -> Tensor<B, 4> {
        match self {
            Self::Float(values) => values.clone().slice_dim(2, 0..len).cast(dtype),
            Self::E4m3 { codes, inv_scales, head_dim } => {
                let (codes, inv_scales) = (codes.clone().slice_dim(2, 0..len), inv_scales.clone().slice_dim(2, 0..len));
                e4m3::decode(codes, inv_scales, *head_dim).cast(dtype)
            }
        }
    }

    /// Ensures a capacity of `len` positions; at least doubles it if it is too small.
    fn with_room_for(self, len: usize) -> Self {
        match self.capacity() {
            capacity if capacity >= len => self,
            capacity => Self::join(&[(&self, capacity)], capacity, len.max(2 * capacity)),
        }
    }

    /// Joins rows, each with its length, so that all end at `len`, with the given capacity.
    fn join(rows: &[(&Self, usize)], len: usize, capacity: usize) -> Self {
        let floats = |part: fn(&Self) -> &Tensor<B, 4>| {
            let rows: Vec<_> = rows.iter().map(|(kept, own)| (part(kept), *own)).collect();
            joined(&rows, len, capacity)
        };
        match rows[0].0 {
            Self::Float(_) => Self::Float(floats(Self::floats)),
            Self::E4m3 { head_dim, .. } => {
                let codes = |kept: &&Self| match kept {
                    Self::E4m3 { codes, .. } => codes.clone(),
                    Self::Float(_) => unreachable!("caches of one generation are alike"),
                };
                let codes: Vec<_> = rows.iter().map(|(kept, own)| (codes(kept), *own)).collect();
                let codes: Vec<_> = codes.iter().map(|(codes, own)| (codes, *own)).collect();
                let codes = joined(&codes, len, capacity);
                Self::E4m3 { codes, inv_scales: floats(Self::floats), head_dim: *head_dim }
            }
        }
    }

    /// Values, or their scales.
    fn floats(&self) -> &Tensor<B, 4> {
        match self {
            Self::Float(values) => values,
            Self::E4m3 { inv_scales, .. } => inv_scales,
        }
    }

    fn keep(&mut self, rows: &[usize]) {
        *self = match self {
            Self::Float(values) => Self::Float(select(values, rows)),
            Self::E4m3 { codes, inv_scales, head_dim } => {
                Self::E4m3 { codes: select(codes, rows), inv_scales: select(inv_scales, rows), head_dim: *head_dim }
            }
        };
    }
}

/// Overwrites `t` with x, starting at a row and a position.
fn put<B: Backend, K: BasicOps<B>>(t: Tensor<B, 4, K>, [row, at]: [usize; 2], x: Tensor<B, 4, K>) -> Tensor<B, 4, K> {
    let [rows, heads, len, width] = x.dims();
    t.slice_assign([row..row + rows, 0..heads, at..at + len, 0..width], x)
}

fn joined<B: Backend, K: BasicOps<B>>(
    rows: &[(&Tensor<B, 4, K>, usize)],
    len: usize,
    capacity: usize,
) -> Tensor<B, 4, K> {
    let [_, heads, _, width] = rows[0].0.dims();
    let batch = rows.iter().map(|(row, _)| row.dims()[0]).sum();
    let all = Tensor::zeros([batch, heads, capacity, width], (&rows[0].0.device(), rows[0].0.dtype()));
    let mut at = 0;
    rows.iter().fold(all, |all, (row, own)| {
        let first = at;
        at += row.dims()[0];
        put(all, [first, len - own], (*row).clone().slice_dim(2, 0..*own))
    })
}

fn select<B: Backend, K: BasicOps<B>>(t: &Tensor<B, 4, K>, rows: &[usize]) -> Tensor<B, 4, K> {
    let rows: Vec<i64> = rows.iter().map(|row| *row as i64).collect();
    let rows = Tensor::<B, 1, Int>::from_data(rows.as_slice(), &t.device());
    t.clone().select(0, rows)
}

#[cfg(test)]
mod tests {
    use burn::backend::Flex;
    use burn::tensor::FloatDType;
    use burn_float8::Float8;

    use super::*;

    type Own = Float8<Flex>;

    fn random(shape: [usize; 4], seed: usize, dtype: FloatDType) -> Tensor<Own, 4> {
        let value = |i: usize| ((i * 7919 + seed * 104_729) % 2003) as f32 / 500.0 - 2.0;
        let values: Vec<f32> = (0..shape.iter().product()).map(value).collect();
        Tensor::<Own, 4>::from_data(TensorData::new(values, shape), &Default::default()).cast(dtype)
    }

    /// Decoding in place gives bitwise the same as attention over decoded tensors. Covers a token
    /// and a prompt, shared key heads, spare capacity, and hidden positions.
    #[test]
    fn caches_are_read_in_place() {
        const HEADS: usize = 6;
        for (kept_in, dtype, head_dim) in [
            (CacheDtype::Bf16, FloatDType::F32, 8),
            (CacheDtype::E4m3, FloatDType::F32, 6),
            (CacheDtype::E4m3, FloatDType::BF16, 16),
            (CacheDtype::F32, FloatDType::BF16, 5),
        ] {
            let options = CacheOptions { dtype: Some(kept_in), positions: 700, rows_alone: false };
            let mut cache = LayerCache::<Own> { kept: None, options };
            let causal = AttentionModuleOptions { is_causal: true, ..Default::default() };
            let mut len = 0;
            for count in [600, 1, 3, 70] {
                let new = [1, 2].map(|seed| random([2, 2, count, head_dim], seed + len, dtype));
                cache.append(new, len);
                len += count;
                let query = random([2, HEADS, count, head_dim], 3 + len, dtype);
                let is_hidden = (0..2 * len).map(|i| i % len < i / len * 20).collect::<Vec<_>>();
                let hidden = Tensor::<Own, 2, Bool>::from_data(TensorData::new(is_hidden, [2, len]), &query.device());
                for hidden in [None, Some(hidden)] {
                    let kept = cache.kept.as_ref().unwrap().each_ref();
                    let [keys, values] = kept.map(|kept| kept.read(len, query.dtype()));
                    let want = match hidden.clone() {
                        Some(hidden) => attention_but(query.clone(), keys, values, hidden, causal),
                        None => attention(query.clone(), keys, values, None, causal),
                    };
                    let first = kept.map(|kept| kept.first(len));
                    let got = cached_attention(query.clone(), first, head_dim, hidden.clone(), causal).expect("a CPU");
                    assert_eq!(got.dtype(), query.dtype());
                    assert_eq!(got.into_data(), want.into_data(), "{kept_in:?}, {count} of {len}");
                }
            }
        }
    }
}
