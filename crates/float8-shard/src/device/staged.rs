//! [`DeviceCollectives`] over host memory, for tests: the device code is the same as with NCCL.
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use crate::comm::{Communicator, Operation, Pending};
use crate::error::ShardError;
use burn_backend::{Backend, DType, TensorMetadata};
use burn_cubecl::CubeRuntime;
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::tensor::CubeTensor;
use burn_float8::backend::{DeviceOperand, Float8Backend};
use burn_float8::shard_hooks::Exchange;
use burn_std::Shape;

use super::joined::Joined;
use super::words_of;
use crate::collectives::{DeviceCollectives, PendingOnDevice, Shards};

static IS_ON: AtomicBool = AtomicBool::new(false);

/// Makes later sharded models on CubeCL devices use device collectives that go through the host and
/// MPI. For tests: everything except NCCL runs without a CUDA device.
pub fn stage_collectives() {
    IS_ON.store(true, Relaxed);
}

struct Staged(Communicator);

pub(super) fn collectives<R, B>(comm: &Communicator) -> Option<Box<dyn DeviceCollectives<B>>>
where
    R: CubeRuntime,
    B: Float8Backend<Operand = DeviceOperand<B>>
        + Backend<FloatTensorPrimitive = CubeTensor<R>, IntTensorPrimitive = CubeTensor<R>>,
{
    let is_on = IS_ON.load(Relaxed) && comm.world_size() > 1;
    is_on.then(|| Box::new(Staged(comm.clone())) as _)
}

/// Words of a tensor.
fn down<R: CubeRuntime>(t: &CubeTensor<R>) -> Vec<u32> {
    let len = t.shape().num_elements() * t.dtype.size() / 4;
    let bytes = t.client.read_one(into_contiguous(t.clone()).handle).expect("the device can be read");
    bytes.as_chunks().0.iter().take(len).map(|word| u32::from_le_bytes(*word)).collect()
}

/// Tensor of these words, with the dtype and device of `like`.
fn up<R: CubeRuntime>(like: &CubeTensor<R>, shape: Vec<usize>, words: &[u32]) -> CubeTensor<R> {
    let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
    let handle = like.client.create_from_slice(&bytes);
    CubeTensor::new_contiguous(like.client.clone(), like.device.clone(), Shape::from(shape), handle, like.dtype)
}

impl<R, B> DeviceCollectives<B> for Staged
where
    R: CubeRuntime,
    B: Float8Backend<Operand = DeviceOperand<B>>
        + Backend<FloatTensorPrimitive = CubeTensor<R>, IntTensorPrimitive = CubeTensor<R>>,
{
    fn start_gather(
        &self,
        label: &str,
        shard: &DeviceOperand<B>,
        shards: Shards,
    ) -> Result<PendingOnDevice<DeviceOperand<B>>, ShardError> {
        let (joined, ranks) = (Joined::new(shard, shards), self.0.world_size());
        let start = |part: CubeTensor<R>| Ok((self.0.all_gather(label, down(&part))?, part));
        let started: Vec<_> = joined.parts().into_iter().map(start).collect::<Result<_, ShardError>>()?;
        Ok(Box::new(move || {
            let land = |(pending, part): (Pending<Vec<u32>>, CubeTensor<R>)| {
                let dims = part.shape();
                Ok(up(&part, vec![ranks, dims[0], dims[1]], &pending.wait()?))
            };
            Ok(joined.join(started.into_iter().map(land).collect::<Result<_, ShardError>>()?))
        }))
    }

    fn start(
        &self,
        operation: Operation,
        label: &str,
        values: CubeTensor<R>,
    ) -> Result<PendingOnDevice<CubeTensor<R>>, ShardError> {
        let (comm, ranks, words) = (&self.0, self.0.world_size(), down(&values));
        let mut shape = values.shape().to_vec();
        let as_they_are = |words: Pending<Vec<u32>>| -> PendingOnDevice<Vec<u32>> { Box::new(move || words.wait()) };
        let floats = |words: Vec<u32>| {
            assert_eq!(values.dtype, DType::F32, "staged collectives exchange f32: wgpu has no bf16");
            words.into_iter().map(f32::from_bits).collect()
        };
        let bits = |floats: Pending<Vec<f32>>| -> PendingOnDevice<Vec<u32>> {
            Box::new(move || Ok(floats.wait()?.into_iter().map(f32::to_bits).collect()))
        };
        shape[0] = operation.rows_on_device(shape[0], ranks);
        let started = match operation {
            Operation::AllReduceSum => bits(comm.all_reduce_sum(label, floats(words))?),
            Operation::ReduceScatterSum => bits(comm.reduce_scatter_sum(label, floats(words))?),
            Operation::AllReduceMaxBits => as_they_are(comm.all_reduce_max_bits(label, words)?),
            _ => as_they_are(comm.all_gather(label, words)?),
        };
        Ok(Box::new(move || Ok(up(&values, shape, &started()?))))
    }

    fn all_to_all(&self, label: &str, rows: CubeTensor<R>, exchange: &Exchange) -> Result<CubeTensor<R>, ShardError> {
        let cols = rows.shape()[1];
        let (exchange, received) = (words_of(&rows, exchange), exchange.received.iter().sum::<usize>().max(1));
        let mut words = down(&rows);
        words.truncate(exchange.sent.iter().sum());
        let mut words = self.0.all_to_all_v(label, words, exchange)?.wait()?;
        words.resize(received * cols * rows.dtype.size() / 4, 0);
        Ok(up(&rows, vec![received, cols], &words))
    }
}
