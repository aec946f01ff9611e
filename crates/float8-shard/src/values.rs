//! Collectives on high-precision tensors: whole weights, gradients and amaxes.
use burn_backend::tensor::{Device, FloatTensor};
use burn_backend::{DType, FloatDType, Scalar, TensorData, TensorMetadata, get_device_settings};
use burn_float8::backend::{Float8Backend, in_dtype};
use burn_float8::shard_hooks::{matrix, read_f32};
use burn_std::{Bytes, Shape, Slice, bf16};
use std::sync::PoisonError;
use std::sync::atomic::Ordering::Relaxed;

use crate::collectives::PendingOnDevice;
use crate::comm::Operation;
use crate::config::ReduceDtype;
use crate::error::ShardError;
use crate::sharding::Sharding;
use crate::wire::{to_bytes, to_words};

impl<B: Float8Backend> Sharding<B> {
    /// This rank's rows of the whole weight `[K, N]`, padded with zeros to `[chunk, N]`.
    pub(crate) fn shard_of(&self, whole: FloatTensor<B>) -> FloatTensor<B> {
        let (rows, [_, n]) = (self.rows(), self.logical);
        if rows.len() == whole.shape()[0] && self.chunk == rows.len() {
            return whole;
        }
        let (device, dtype) = (B::float_device(&whole), FloatDType::from(whole.dtype()));
        let (len, zeros) = (rows.len(), B::float_zeros(Shape::from(self.own_shape().to_vec()), &device, dtype));
        if len == 0 {
            return zeros;
        }
        // A copy: a slice may be a view that keeps the whole in memory.
        let [own, place] = [rows, 0..len].map(|rows| [Slice::from(rows), Slice::from(0..n)]);
        B::float_slice_assign(zeros, &place, B::float_slice(whole, &own))
    }

    /// Gathers the whole weight `[K, N]` from every rank's shard, in its dtype. Over the host this
    /// waits for the device.
    pub(crate) fn gather_values(&self, shard: FloatTensor<B>) -> FloatTensor<B> {
        let [k, n] = self.logical;
        if self.ranks() == 1 {
            return shard;
        }
        let (device, dtype) = (B::float_device(&shard), shard.dtype());
        if let Some(collectives) = self.world.shard.on_device(&device) {
            let all = collectives.start(Operation::AllGather, &self.name, shard).and_then(|pending| pending());
            let all = all.unwrap_or_else(|error| self.fail(error));
            self.full_gathers.fetch_add(1, Relaxed);
            let is_whole = all.shape()[0] == k;
            return if is_whole { all } else { B::float_slice(all, &[Slice::from(0..k), Slice::from(0..n)]) };
        }
        let own = shard.shape().num_elements() * dtype.size();
        let words = words_of::<B>(shard);
        let len = words.len();
        let all = self.world.shard.comm.all_gather(&self.name, words).and_then(|pending| pending.wait());
        let all = all.unwrap_or_else(|error| self.fail(error));
        self.full_gathers.fetch_add(1, Relaxed);
        let whole = all.chunks_exact(len.max(1)).flat_map(|words| to_bytes(words, own));
        tensor_of::<B>(whole, [k, n], dtype, &device)
    }

    /// Sum over all ranks of this rank's rows `[chunk, N]` of a gradient `[K, N]` plus the unsynced
    /// ones, in the gradient's dtype. In a step it is started, and the result is zeros until
    /// [`wait`](crate::gradients::wait). So are gradients that are not exchanged yet.
    pub(crate) fn reduce_scatter_when_synced(&self, gradient: FloatTensor<B>) -> FloatTensor<B> {
        if self.ranks() == 1 {
            return gradient;
        }
        let is_synced = self.world.requires_gradient_sync.load(Relaxed);
        let mut unsynced = self.unsynced.lock().unwrap_or_else(PoisonError::into_inner);
        let (device, dtype) = (B::float_device(&gradient), gradient.dtype());
        let zeros = || B::float_zeros(Shape::from(self.own_shape().to_vec()), &device, FloatDType::from(dtype));
        let sum = match unsynced.take() {
            None if is_synced => gradient,
            None => in_dtype::<B>(gradient, DType::F32),
            Some(sum) => B::float_add(sum, in_dtype::<B>(gradient, DType::F32)),
        };
        if !is_synced {
            *unsynced = Some(sum);
            return zeros();
        }
        let started = self.start_reduce_scatter(in_dtype::<B>(sum, dtype));
        let reduces = &self.world.reduces;
        let sum = match reduces.has_begun() {
            true => started.and_then(|started| reduces.push(&self.name, started)).map(|()| zeros()),
            false => started.and_then(|started| started()),
        };
        sum.unwrap_or_else(|error| self.fail(error))
    }

    /// Starts the sum over all ranks of this rank's rows `[chunk, N]` of a gradient `[K, N]`,
    /// exchanged in the configured dtype, then between replicas in f32, and returned in the
    /// gradient's. Over the host this waits for the device.
    pub(crate) fn start_reduce_scatter(
        &self,
        gradient: FloatTensor<B>,
    ) -> Result<PendingOnDevice<FloatTensor<B>>, ShardError> {
        let ([k, n], ranks, chunk) = (self.logical, self.ranks(), self.chunk);
        let (device, dtype, name) = (B::float_device(&gradient), gradient.dtype(), self.name.clone());
        let (shard, replicate) = (&self.world.shard, self.world.replicate.clone());
        if let Some(collectives) = shard.on_device(&device) {
            let exchanged = match self.config.reduce_dtype {
                ReduceDtype::F32 => DType::F32,
                ReduceDtype::Bf16 => DType::BF16,
            };
            let mut all = vec![in_dtype::<B>(gradient, exchanged)];
            let padding = ranks * chunk - k;
            if padding > 0 {
                all.push(B::float_zeros(Shape::from(vec![padding, n]), &device, FloatDType::from(exchanged)));
            }
            let all = if padding > 0 { B::float_cat(all, 0) } else { all.remove(0) };
            let own = collectives.start(Operation::ReduceScatterSum, &name, all)?;
            return Ok(Box::new(move || {
                let mut own = own()?;
                if let Some(replicas) = replicate.on_device(&device) {
                    own = replicas.start(Operation::AllReduceSum, &name, in_dtype::<B>(own, DType::F32))?()?;
                }
                Ok(in_dtype::<B>(own, dtype))
            }));
        }
        let mut all = read_f32::<B>(gradient);
        all.resize(ranks * chunk * n, 0.0);
        let started: PendingOnDevice<Vec<f32>> = match self.config.reduce_dtype {
            ReduceDtype::F32 => {
                let sum = shard.comm.reduce_scatter_sum(&name, all)?;
                Box::new(move || sum.wait())
            }
            ReduceDtype::Bf16 => {
                let bytes = all.into_iter().flat_map(|value| bf16::from_f32(value).to_le_bytes()).collect();
                let words = shard.comm.all_to_all(&name, to_words(bytes))?;
                Box::new(move || Ok(sum_bf16(&words.wait()?, ranks)))
            }
        };
        Ok(Box::new(move || {
            let own = started()?;
            let own = match replicate.size() {
                1 => own,
                _ => replicate.comm.all_reduce_sum(&name, own)?.wait()?,
            };
            Ok(in_dtype::<B>(B::float_from_data(TensorData::new(own, [chunk, n]), &device), dtype))
        }))
    }

    /// Amaxes of the whole weight from the amaxes of each rank of the copy; NaN wins.
    pub(crate) fn reduce_amax(&self, amax: FloatTensor<B>) -> FloatTensor<B> {
        match self.world.copy.size() {
            1 => amax,
            _ => self.world.copy.max(&self.name, amax).unwrap_or_else(|error| self.fail(error)),
        }
    }
}

/// Sums equal parts of `ranks` ranks in f32, in rank order. Each word holds two bf16.
fn sum_bf16(words: &[u32], ranks: usize) -> Vec<f32> {
    let part = words.len() / ranks;
    // A bf16 is the upper half of an f32.
    let of = |word: u32| [word << 16, word & 0xffff_0000].map(f32::from_bits);
    let sum = |i: usize| {
        (0..ranks).map(|rank| of(words[rank * part + i])).reduce(|[a, b], [c, d]| [a + c, b + d]).unwrap_or_default()
    };
    (0..part).flat_map(sum).collect()
}

/// Reads a tensor as words. Waits for the device.
pub(crate) fn words_of<B: Float8Backend>(t: FloatTensor<B>) -> Vec<u32> {
    let data = burn_std::future::block_on(B::float_into_data(t)).expect("a tensor that exists can be read");
    to_words(data.bytes.to_vec())
}

/// Matrix of the first bytes.
pub(crate) fn tensor_of<B: Float8Backend>(
    bytes: impl Iterator<Item = u8>,
    dims: [usize; 2],
    dtype: DType,
    device: &Device<B>,
) -> FloatTensor<B> {
    let bytes: Vec<u8> = bytes.take(dims[0] * dims[1] * dtype.size()).collect();
    let data = TensorData::from_bytes(Bytes::from_bytes_vec(bytes), Shape::from(dims.to_vec()), dtype);
    B::float_from_data(data, device)
}

/// max |x| over all elements, `[1]` in f32; NaN if x has one.
pub(crate) fn tensor_amax<B: Float8Backend>(x: FloatTensor<B>) -> FloatTensor<B> {
    // One reduction would be one loop over all elements: slow on a GPU, and Mesa's software Vulkan ends
    // a loop after 65,535 iterations.
    let amaxes = column_amaxes::<B>(matrix::<B>(x));
    let n = amaxes.shape()[0];
    column_amaxes::<B>(B::float_reshape(amaxes, Shape::from(vec![n, 1])))
}

/// max |x| of each column of `[rows, N]`: `[N]`; NaN if the column has one.
pub(crate) fn column_amaxes<B: Float8Backend>(x: FloatTensor<B>) -> FloatTensor<B> {
    let n = x.shape()[1];
    let x = in_dtype::<B>(x, DType::F32);
    let bool_dtype = get_device_settings::<B>(&B::float_device(&x)).bool_dtype;
    let has_nan = B::bool_any_dim(B::float_is_nan(x.clone(), bool_dtype), 0);
    let amax = B::float_max_dim(B::float_abs(x), 0);
    let amax = B::float_mask_fill(amax, has_nan, Scalar::from(f32::NAN));
    B::float_reshape(amax, Shape::from(vec![n]))
}

/// Appends `count` rows (axis 0) or columns (axis 1) of amaxes, so that the scales of a cast cover
/// other ranks.
pub(crate) fn with_amaxes<B: Float8Backend>(
    own: FloatTensor<B>,
    amaxes: FloatTensor<B>,
    axis: usize,
    count: usize,
) -> FloatTensor<B> {
    let mut shape = own.shape().to_vec();
    shape[axis] = 1;
    let amaxes = in_dtype::<B>(B::float_reshape(amaxes, Shape::from(shape.clone())), own.dtype());
    shape[axis] = count;
    B::float_cat(vec![own, B::float_expand(amaxes, Shape::from(shape))], axis)
}
