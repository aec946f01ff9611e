//! The same exchanges on a device's memory, where its backend has [`DeviceCollectives`]: the host waits for none of them.
use burn_backend::tensor::FloatTensor;
use burn_backend::{DType, FloatDType, TensorMetadata};
use burn_float8::backend::{Float8Backend, in_dtype};
use burn_std::{Shape, Slice};
use float8_comm::CommError;
use std::sync::atomic::Ordering::Relaxed;

use crate::collectives::{DeviceCollectives, PendingOnDevice, ShardedAxis, Shards};
use crate::config::ReduceDtype;
use crate::sharding::Sharding;

impl<B: Float8Backend> Sharding<B> {
    /// Starts the gather of an operand: what [`finish_gather`](Self::finish_gather) returns comes from what is returned here, and
    /// what the device is given until then runs beside the transfer.
    pub(crate) fn start_gather_on_device(
        &self,
        collectives: &dyn DeviceCollectives<B>,
        shard: &B::Operand,
        axis: ShardedAxis,
    ) -> Result<PendingOnDevice<B::Operand>, CommError> {
        let shards = Shards { axis, chunk: self.chunk, len: self.logical[0] };
        let pending = collectives.start_gather(&self.name, shard, shards)?;
        self.float8_gathers.fetch_add(1, Relaxed);
        Ok(pending)
    }

    /// [`gather_values`](Self::gather_values).
    pub(crate) fn gather_values_on_device(
        &self,
        collectives: &dyn DeviceCollectives<B>,
        shard: FloatTensor<B>,
    ) -> Result<FloatTensor<B>, CommError> {
        let [k, n] = self.logical;
        let all = collectives.gather(&self.name, shard)?;
        self.full_gathers.fetch_add(1, Relaxed);
        let is_whole = all.shape()[0] == k;
        Ok(if is_whole { all } else { B::float_slice(all, &[Slice::from(0..k), Slice::from(0..n)]) })
    }

    /// [`reduce_scatter`](Self::reduce_scatter).
    pub(crate) fn reduce_scatter_on_device(
        &self,
        collectives: &dyn DeviceCollectives<B>,
        gradient: FloatTensor<B>,
    ) -> Result<FloatTensor<B>, CommError> {
        let ([k, n], dtype) = (self.logical, gradient.dtype());
        let device = B::float_device(&gradient);
        let exchanged = match self.config.reduce_dtype {
            ReduceDtype::F32 => DType::F32,
            ReduceDtype::Bf16 => DType::BF16,
        };
        let all = in_dtype::<B>(gradient, exchanged);
        let padding = self.ranks() * self.chunk - k;
        let all = match padding {
            0 => all,
            _ => B::float_cat(
                vec![all, B::float_zeros(Shape::from(vec![padding, n]), &device, FloatDType::from(exchanged))],
                0,
            ),
        };
        let own = collectives.reduce_scatter_sum(&self.name, all)?;
        Ok(in_dtype::<B>(own, dtype))
    }
}
