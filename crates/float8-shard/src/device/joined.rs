//! Joins operands of shards on a device. The result equals the whole operand of
//! [`Float8Backend::fp8_write`](burn_float8::backend::Float8Backend::fp8_write) bit for bit. Each
//! rank's words of codes and of scales are gathered one after another.
//!
//! ```text
//! rows          [ranks · h, w]                                    cropped to the whole's rows
//! contraction   [ranks, h, w] → [h, ranks, w] = [h, ranks · w]    cropped to the whole's words
//! ```
use burn_backend::{Backend, DType, TensorMetadata};
use burn_cubecl::CubeRuntime;
use burn_cubecl::kernel::{into_contiguous, slice};
use burn_cubecl::ops::{numeric, permute};
use burn_cubecl::tensor::CubeTensor;
use burn_float8::backend::{DeviceOperand, OperandLayout};
use burn_float8::shard_hooks::scales;
use burn_std::Shape;
use float8_kernels::{Granularity, row_words};

use crate::collectives::{ShardedAxis, Shards};

/// Operand whose parts are gathered.
pub(super) struct Joined<B: Backend> {
    shards: Shards,
    /// This rank's operand, which provides everything that is not gathered.
    shard: DeviceOperand<B>,
    codes: JoinedPart,
    /// None if every rank has the same scales.
    scales: Option<JoinedPart>,
}

/// Rows and words per row, of each rank and of the whole.
#[derive(Clone, Copy)]
struct JoinedPart {
    shard: [usize; 2],
    whole: [usize; 2],
}

impl<R: CubeRuntime, B: Backend<FloatTensorPrimitive = CubeTensor<R>, IntTensorPrimitive = CubeTensor<R>>> Joined<B> {
    pub(super) fn new(shard: &DeviceOperand<B>, shards: Shards) -> Self {
        let granularity = shard.layout.granularity;
        let rows = shard.codes.shape()[0];
        let [own, whole] = [shards.chunk, shards.len].map(|len| match shards.axis {
            ShardedAxis::Rows => [len, shard.layout.k],
            ShardedAxis::Contraction => [rows, len],
        });
        let part = |words: &dyn Fn([usize; 2]) -> [usize; 2]| JoinedPart { shard: words(own), whole: words(whole) };
        let of_scales = |[rows, k]: [usize; 2]| match granularity {
            // Scales in rows of tiles; a chunk holds whole tiles.
            Granularity::Block1x32 => {
                let words = granularity.scale_words(1, k);
                [granularity.scale_words(rows, k) / words, words]
            }
            _ => granularity.scale_dims(rows, k),
        };
        let codes = part(&|[rows, k]| [rows, row_words(k)]);
        let scales = (!shards.axis.shares_scales(granularity)).then(|| part(&of_scales));
        Self { shards, shard: shard.clone(), codes, scales }
    }

    /// Parts of this rank, contiguous.
    pub(super) fn parts(&self) -> Vec<CubeTensor<R>> {
        let codes = cropped(self.shard.codes.clone(), self.codes.shard);
        let scales = self.scales.map(|part| {
            let scales = self.shard.inv_scale.clone();
            match self.shard.layout.granularity {
                Granularity::Block1x32 => relabelled(scales, &part.shard),
                _ => cropped(scales, part.shard),
            }
        });
        [codes].into_iter().chain(scales).collect()
    }

    /// Builds the whole operand from the parts of all ranks, each `[ranks, rows, words]`.
    pub(super) fn join(self, gathered: Vec<CubeTensor<R>>) -> DeviceOperand<B> {
        let axis = self.shards.axis;
        let mut gathered = gathered.into_iter();
        let mut next = |part: JoinedPart| gathered.next().map(|all| joined(all, axis, part));
        let codes = next(self.codes).expect("codes of all ranks");
        let k = match axis {
            ShardedAxis::Rows => self.shard.layout.k,
            ShardedAxis::Contraction => self.shards.len,
        };
        let granularity = self.shard.layout.granularity;
        let (shape, _) = scales(granularity, codes.shape()[0], k);
        let inv_scale = self.scales.and_then(next).map(|scales| relabelled(scales, &shape.to_vec()));
        let codes = if axis == ShardedAxis::Contraction { without_padding(codes, k) } else { codes };
        let inv_scale = inv_scale.unwrap_or_else(|| into_contiguous(self.shard.inv_scale.clone()));
        DeviceOperand { codes, inv_scale, layout: OperandLayout { k, ..self.shard.layout } }
    }
}

/// Codes `[rows, words]` of the first `k` elements of each row, contiguous.
pub(super) fn first<R: CubeRuntime>(codes: CubeTensor<R>, k: usize) -> CubeTensor<R> {
    let rows = codes.shape()[0];
    without_padding(cropped(codes, [rows, row_words(k)]), k)
}

fn joined<R: CubeRuntime>(
    all: CubeTensor<R>,
    axis: ShardedAxis,
    JoinedPart { shard, whole }: JoinedPart,
) -> CubeTensor<R> {
    let ([h, w], ranks) = (shard, all.shape()[0]);
    match axis {
        ShardedAxis::Rows => {
            // The first rows of a contiguous tensor need no copy.
            let all = relabelled(all, &[ranks * h, w]);
            let beyond = (ranks * h - whole[0]) * w * all.dtype.size();
            let handle = if beyond == 0 { all.handle } else { all.handle.offset_end(beyond as u64) };
            CubeTensor::new_contiguous(all.client, all.device, Shape::from(whole.to_vec()), handle, all.dtype)
        }
        ShardedAxis::Contraction => {
            let side_by_side = into_contiguous(permute(all, &[1, 0, 2]));
            cropped(relabelled(side_by_side, &[h, ranks * w]), whole)
        }
    }
}

/// Sets codes beyond `k` to zero, which a NaN scale or a crop has changed.
fn without_padding<R: CubeRuntime>(codes: CubeTensor<R>, k: usize) -> CubeTensor<R> {
    if codes.shape()[1] * 4 == k {
        return codes;
    }
    let mask: Vec<u8> = (0..4 * row_words(k)).map(|i| if i < k { 0xff } else { 0 }).collect();
    let handle = codes.client.create_from_slice(&mask);
    let shape = Shape::from(vec![1, row_words(k)]);
    let mask = CubeTensor::new_contiguous(codes.client.clone(), codes.device.clone(), shape, handle, DType::U32);
    into_contiguous(numeric::bitwise_and(codes, mask))
}

/// First rows and words, contiguous.
fn cropped<R: CubeRuntime>(t: CubeTensor<R>, dims: [usize; 2]) -> CubeTensor<R> {
    let is_whole = t.shape().to_vec() == dims;
    into_contiguous(if is_whole { t } else { slice(t, &dims.map(|len| 0..len)) })
}

/// Words of a tensor, contiguous, in another shape.
fn relabelled<R: CubeRuntime>(t: CubeTensor<R>, dims: &[usize]) -> CubeTensor<R> {
    let t = into_contiguous(t);
    CubeTensor::new_contiguous(t.client, t.device, Shape::from(dims.to_vec()), t.handle, t.dtype)
}

#[cfg(test)]
mod tests;
