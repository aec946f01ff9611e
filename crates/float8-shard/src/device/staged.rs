//! [`DeviceCollectives`] over host memory, for tests: the device code is the same as with NCCL.
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use crate::comm::{Communicator, Pending};
use crate::error::ShardError;
use burn_backend::{Backend, DType, TensorMetadata};
use burn_cubecl::CubeRuntime;
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::tensor::CubeTensor;
use burn_float8::backend::{DeviceOperand, Float8Backend};
use burn_std::Shape;

use super::joined::Joined;
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

impl Staged {
    fn floats<R: CubeRuntime>(
        t: CubeTensor<R>,
        shape: Vec<usize>,
        exchange: impl FnOnce(Vec<f32>) -> Result<Pending<Vec<f32>>, ShardError>,
    ) -> Result<CubeTensor<R>, ShardError> {
        assert_eq!(t.dtype, DType::F32, "staged collectives are f32's");
        let own = down(&t).into_iter().map(f32::from_bits).collect();
        let words: Vec<u32> = exchange(own)?.wait()?.into_iter().map(f32::to_bits).collect();
        Ok(up(&t, shape, &words))
    }
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

    fn gather(&self, label: &str, shard: CubeTensor<R>) -> Result<CubeTensor<R>, ShardError> {
        let dims = shard.shape();
        let all = self.0.all_gather(label, down(&shard))?.wait()?;
        Ok(up(&shard, vec![self.0.world_size() * dims[0], dims[1]], &all))
    }

    fn reduce_scatter_sum(&self, label: &str, all: CubeTensor<R>) -> Result<CubeTensor<R>, ShardError> {
        let mut shape = all.shape().to_vec();
        shape[0] /= self.0.world_size();
        Self::floats(all, shape, |values| self.0.reduce_scatter_sum(label, values))
    }

    fn all_reduce_sum(&self, label: &str, values: CubeTensor<R>) -> Result<CubeTensor<R>, ShardError> {
        let shape = values.shape().to_vec();
        Self::floats(values, shape, |values| self.0.all_reduce_sum(label, values))
    }

    fn all_reduce_max(&self, label: &str, values: CubeTensor<R>) -> Result<CubeTensor<R>, ShardError> {
        let bits = self.0.all_reduce_max_bits(label, down(&values))?.wait()?;
        Ok(up(&values, values.shape().to_vec(), &bits))
    }
}
