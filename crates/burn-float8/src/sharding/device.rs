//! The same exchanges on a device's memory, where its backend has [`DeviceCollectives`]: the host waits for none of them.
use burn_backend::tensor::{Device, FloatTensor};
use burn_backend::{DType, FloatDType, TensorMetadata};
use burn_std::{Shape, Slice};
use float8_comm::CommError;
use std::sync::atomic::Ordering::Relaxed;

use super::{Amax, ReduceDtype, Sharding};
use crate::backend::{DeviceCollectives, Float8Backend, PendingOnDevice, Shards, in_dtype};
use crate::terms::ContractionAxis;

impl Sharding {
    /// The collectives of this weight's ranks on their devices' memory.
    pub(super) fn on_device<B: Float8Backend>(&self, device: &Device<B>) -> Option<Box<dyn DeviceCollectives<B>>> {
        B::fp8_collectives(device, &self.comm)
    }

    /// Starts the gather of an operand: what [`finish_gather`](Self::finish_gather) returns comes from what is returned here, and
    /// what the device is given until then runs beside the transfer.
    pub(super) fn start_gather_on_device<B: Float8Backend>(
        &self,
        collectives: &dyn DeviceCollectives<B>,
        shard: &B::Operand,
        axis: ContractionAxis,
    ) -> Result<PendingOnDevice<B::Operand>, CommError> {
        let shards = Shards { axis: axis.into(), chunk: self.chunk, len: self.logical[0] };
        let pending = collectives.start_gather(&self.name, shard, shards)?;
        self.float8_gathers.fetch_add(1, Relaxed);
        Ok(pending)
    }

    /// [`gather_values`](Self::gather_values).
    pub(super) fn gather_values_on_device<B: Float8Backend>(
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
    pub(super) fn reduce_scatter_on_device<B: Float8Backend>(
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
        let padding = self.comm.world_size() * self.chunk - k;
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

    /// [`reduce_amax`](Self::reduce_amax).
    pub(super) fn reduce_amax_on_device<B: Float8Backend>(
        &self,
        collectives: &dyn DeviceCollectives<B>,
        amax: &Amax<B>,
    ) -> Result<Amax<B>, CommError> {
        collectives.all_reduce_max(&self.name, amax.0.clone()).map(Amax)
    }
}
