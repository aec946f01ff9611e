//! Experts over ranks (expert parallelism): each rank has some experts whole, and all their tokens.
//!
//! ```text
//! rank r has the experts [r·chunk, (r + 1)·chunk) of w [G, K, N], zeros beyond G      chunk = ⌈G / R⌉
//! numbers of rows → all-to-all of rows → grouped GEMMs → all-to-all back
//! ```
//! Rows travel in their dtype; the rank of their expert casts them.
//! A gradient of an expert is complete on its rank, and summed between replicas only. Casts have the scales
//! of one process with the batches of all ranks that divide the copy.
use std::sync::Arc;

use burn_backend::tensor::FloatTensor;
use burn_backend::{DType, TensorMetadata};
use burn_float8::backend::{Float8Backend, in_dtype};
use burn_float8::shard_hooks::{CastAmax, Exchange, ExpertHooks, ExpertLayout, RowExchange, WeightCast};
use burn_std::Shape;
use float8_kernels::{GROUP_ALIGN, Granularity};

use crate::config::ShardConfig;
use crate::sharding::Sharding;
use crate::values::{column_amaxes, tensor_amax, tensor_of, with_amaxes, words_of};
use crate::wire::to_bytes;
use crate::world::World;

impl<B: Float8Backend> Sharding<B> {
    /// Division of experts `[G, K, N]`.
    pub(crate) fn of_experts(world: Arc<World<B>>, name: &str, whole: &Shape, config: ShardConfig) -> Self {
        let logical = [whole[0], whole[1] * whole[2]];
        Self { whole: whole.to_vec(), ..Self::new(world, name, logical, 1, config) }
    }

    /// Whether the weight is of experts.
    pub(crate) fn has_experts(&self) -> bool {
        self.whole.len() == 3
    }

    /// Some rows of the weight, or experts, as a matrix.
    pub(crate) fn matrix(&self, rows: FloatTensor<B>) -> FloatTensor<B> {
        let len = rows.shape()[0];
        B::float_reshape(rows, Shape::from(vec![len, self.logical[1]]))
    }

    /// Rows of a [`matrix`](Self::matrix) in the weight's shape.
    pub(crate) fn in_shape(&self, rows: FloatTensor<B>) -> FloatTensor<B> {
        let shape = [&[rows.shape()[0]], &self.whole[1..]].concat();
        B::float_reshape(rows, Shape::from(shape))
    }
}

impl<B: Float8Backend> RowExchange<B> for Sharding<B> {
    fn layout(&self) -> ExpertLayout {
        ExpertLayout { experts: self.logical[0], chunk: self.chunk, rank: self.world.shard.comm.rank() }
    }

    fn counts(&self, own: Vec<u32>) -> Vec<Vec<u32>> {
        let experts = own.len();
        let all = self.world.shard.comm.all_gather(&self.name, own).and_then(|pending| pending.wait());
        let all = all.unwrap_or_else(|error| self.fail(error));
        all.chunks_exact(experts).map(<[u32]>::to_vec).collect()
    }

    fn all_to_all(&self, rows: FloatTensor<B>, exchange: &Exchange) -> FloatTensor<B> {
        let ([_, cols], dtype, device) = (rows.shape().dims(), rows.dtype(), B::float_device(&rows));
        let size = cols * dtype.size();
        if !size.is_multiple_of(4) {
            // Ranks exchange words.
            return in_dtype::<B>(self.all_to_all(in_dtype::<B>(rows, DType::F32), exchange), dtype);
        }
        if let Some(collectives) = self.world.shard.on_device(&device) {
            return collectives.all_to_all(&self.name, rows, exchange).unwrap_or_else(|error| self.fail(error));
        }
        let (exchange, received) = (exchange.of_groups(size / 4), exchange.received.iter().sum::<usize>().max(1));
        let mut words = words_of::<B>(rows);
        words.truncate(exchange.sent.iter().sum());
        let all = self.world.shard.comm.all_to_all_v(&self.name, words, exchange).and_then(|pending| pending.wait());
        let all = all.unwrap_or_else(|error| self.fail(error));
        // A row of zeros, if none is received.
        let bytes = to_bytes(&all, 4 * all.len()).chain(std::iter::repeat_n(0, size));
        tensor_of::<B>(bytes, [received, cols], dtype, &device)
    }
}

impl<B: Float8Backend> ExpertHooks<B> for Sharding<B> {
    fn cast(&self, cast: &WeightCast<'_, B>) -> (B::Operand, CastAmax<B>) {
        let own = cast.matrix();
        if cast.divides_rows() {
            // Rows after the last group, which no GEMM reads, with the amaxes over all ranks.
            let amaxes = self.reduce_amax(column_amaxes::<B>(own.clone()));
            return cast.quantize(with_amaxes::<B>(own, amaxes, 0, GROUP_ALIGN), None);
        }
        let amax = || self.reduce_amax(tensor_amax::<B>(own.clone()));
        let has_one_scale = cast.cast().granularity == Granularity::Tensor;
        cast.quantize(own.clone(), if has_one_scale { Some(&amax) } else { None })
    }
}
