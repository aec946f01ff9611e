//! Attention over a KV cache. Each tile of keys and values is decoded once for all query heads that
//! read it.

use core::ops::Range;
use std::any::Any;
use std::borrow::Cow;

use burn_backend::{Backend, DType, TensorData, TensorMetadata};
use burn_std::f16;
use float8_kernels::{Format, reference};
use rayon::prelude::*;

use super::super::data;
use super::super::vector::{nearest, vectorized};
use super::super::view::View;
use super::kernel::{self, QUERIES, Running, Scores, Sizes, matrix};
use super::product::Matrix;
use crate::backend::attention::CachedHeads;

/// Keys or values of a cache, `[batch, heads, positions, width]`.
pub(super) struct Kept<'a> {
    encoded: Encoded<'a>,
    /// Dtype of decoded values. They are rounded to it as if decoded into a tensor.
    dtype: DType,
}

enum Encoded<'a> {
    F32(View<'a>),
    Bf16(Bytes<'a>),
    E4m3 { codes: Bytes<'a>, inv_scales: View<'a> },
}

impl<'a> Kept<'a> {
    /// Values of a cache, rounded to the dtype of the query.
    pub(super) fn new<B: Backend>(heads: &'a CachedHeads<B>, dtype: DType) -> Self {
        let encoded = match heads {
            CachedHeads::Float(values) if values.dtype() == DType::BF16 => {
                Encoded::Bf16(Bytes::new(values, 2, || data(B::float_into_data(values.clone()))))
            }
            CachedHeads::Float(values) => Encoded::F32(View::new::<B>(values)),
            CachedHeads::E4m3 { codes, inv_scales } => Encoded::E4m3 {
                codes: Bytes::new(codes, 4, || data(B::int_into_data(codes.clone())).convert::<i32>()),
                inv_scales: View::new::<B>(inv_scales),
            },
        };
        Self { encoded, dtype }
    }

    /// Decodes some positions of a head into `values`.
    #[inline(always)]
    fn read(&self, [batch, head]: [usize; 2], positions: Range<usize>, values: &mut [f32]) {
        let width = values.len() / positions.len();
        let first = [batch, head, positions.start];
        match &self.encoded {
            Encoded::E4m3 { codes, inv_scales } => {
                match codes.strides[2] == width {
                    true => reference::decode_slice(codes.row(first, values.len()), Format::E4m3, values),
                    false => positions.clone().zip(values.chunks_exact_mut(width)).for_each(|(position, values)| {
                        reference::decode_slice(codes.row([batch, head, position], width), Format::E4m3, values);
                    }),
                }
                for (position, values) in positions.zip(values.chunks_exact_mut(width)) {
                    let inv_scale = inv_scales.from([batch, head, position])[0];
                    values.iter_mut().for_each(|value| *value *= inv_scale);
                }
            }
            Encoded::F32(view) => {
                for (position, values) in positions.zip(values.chunks_exact_mut(width)) {
                    values.copy_from_slice(&view.from([batch, head, position])[..width]);
                }
            }
            Encoded::Bf16(bytes) => {
                for (position, values) in positions.zip(values.chunks_exact_mut(width)) {
                    let (pairs, _) = bytes.row([batch, head, position], 2 * width).as_chunks();
                    for (value, pair) in values.iter_mut().zip(pairs) {
                        *value = f32::from_bits(u32::from(u16::from_ne_bytes(*pair)) << 16);
                    }
                }
            }
        }
        match self.dtype {
            DType::BF16 => values.iter_mut().for_each(|value| *value = f32::from_bits(nearest(*value) << 16)),
            DType::F16 => values.iter_mut().for_each(|value| *value = f16::from_f32(*value).to_f32()),
            _ => {}
        }
    }

    /// Decodes all values, head by head. Each has `width` elements.
    fn whole(&self, sizes: &Sizes, width: usize) -> View<'static> {
        let of_head = sizes.keys * width;
        let mut values = vec![0.0; sizes.batch * sizes.kv_heads * of_head];
        values.par_chunks_mut(of_head).enumerate().for_each(|(i, values)| {
            vectorized!(self.read([i / sizes.kv_heads, i % sizes.kv_heads], 0..sizes.keys, values));
        });
        View { values: Cow::Owned(values), strides: [sizes.kv_heads * of_head, of_head, width] }
    }
}

/// Bytes of a tensor of four axes, with strides of the first three. The bytes of a row are
/// contiguous.
struct Bytes<'a> {
    bytes: Cow<'a, [u8]>,
    strides: [usize; 3],
}

impl<'a> Bytes<'a> {
    /// Borrows the tensor's bytes if the backend exposes them on a little-endian host. Otherwise
    /// copies the data of `read`.
    fn new<T: TensorMetadata + Any>(tensor: &'a T, size: usize, read: impl FnOnce() -> TensorData) -> Self {
        #[cfg(all(feature = "flex", target_endian = "little"))]
        if let Some(tensor) = (tensor as &dyn Any).downcast_ref::<burn_flex::FlexTensor>()
            && tensor.dtype().size() == size
            && let Ok(&[i, j, k, 1]) = <&[isize; 4]>::try_from(tensor.layout().strides())
            && let [Ok(i), Ok(j), Ok(k)] = [i, j, k].map(usize::try_from)
        {
            let bytes = Cow::Borrowed(&tensor.bytes()[tensor.layout().start_offset() * size..]);
            return Self { bytes, strides: [i, j, k].map(|stride| stride * size) };
        }
        let [_, j, k, width] = tensor.shape().dims();
        let mut bytes = read().as_bytes().to_vec();
        if cfg!(target_endian = "big") && size == 4 {
            bytes.chunks_exact_mut(size).for_each(<[u8]>::reverse);
        }
        Self { bytes: Cow::Owned(bytes), strides: [j * k * width, k * width, width].map(|stride| stride * size) }
    }

    #[inline(always)]
    fn row(&self, at: [usize; 3], len: usize) -> &[u8] {
        let offset: usize = self.strides.iter().zip(at).map(|(stride, at)| stride * at).sum();
        &self.bytes[offset..][..len]
    }
}

/// y `[batch, heads, queries, value_dim]`: the result of [`kernel::forward`] on decoded keys and
/// values. All heads share one mask.
pub(super) fn forward(sizes: Sizes, q: &View<'_>, [k, v]: [&Kept<'_>; 2], scores: &Scores<'_>) -> Vec<f32> {
    let Sizes { batch, heads, kv_heads, queries, dim, value_dim, .. } = sizes;
    if queries > QUERIES {
        // Several tiles of queries would decode each tile of keys again.
        let [k, v] = [(k, dim), (v, value_dim)].map(|(kept, width)| kept.whole(&sizes, width));
        return kernel::forward(sizes, [q, &k, &v], scores).0;
    }
    let (group, of_head) = (heads / kv_heads, queries * value_dim);
    // Query heads per task: all that share keys, unless that leaves threads idle.
    let part = group.div_ceil(rayon::current_num_threads().div_ceil(batch * kv_heads).min(group));
    let mut y = vec![0.0; batch * heads * of_head];
    let of_keys = y.par_chunks_mut(group * of_head).enumerate();
    let tasks = of_keys.flat_map(|(index, y)| {
        y.par_chunks_mut(part * of_head).enumerate().map(move |(task, y)| (index, task * part, y))
    });
    tasks.for_each(|(index, first, y)| {
        let (batch, kv_head) = (index / kv_heads, index % kv_heads);
        let head = kv_head * group + first;
        let longest = sizes.tile_keys();
        let [mut p, mut k_tile, mut v_tile] = [queries, dim, value_dim].map(|width| vec![0.0; longest * width]);
        let mut running: Vec<_> = (0..y.len() / of_head).map(|_| Running::new()).collect();
        for tile in scores.tiles(&sizes, batch, head, 0..queries) {
            let (k_tile, v_tile) = (&mut k_tile[..tile.keys.len() * dim], &mut v_tile[..tile.keys.len() * value_dim]);
            vectorized!({
                k.read([batch, kv_head], tile.keys.clone(), k_tile);
                v.read([batch, kv_head], tile.keys.clone(), v_tile);
            });
            let (k, v) = (Matrix::of(k_tile, dim), Matrix::of(v_tile, value_dim));
            for (i, (running, y)) in running.iter_mut().zip(y.chunks_exact_mut(of_head)).enumerate() {
                let tile = tile.of_head(head + i);
                running.add(&sizes, scores, &tile, [matrix(q, [batch, head + i, 0]), k, v], &mut p, y);
            }
        }
        running.iter().zip(y.chunks_exact_mut(of_head)).for_each(|(running, y)| running.finish(&sizes, y, None));
    });
    y
}
