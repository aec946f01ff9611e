//! CUDA collectives: NCCL on the addresses of Burn's tensors, ordered with CubeCL's streams on the
//! device.
use std::any::{Any, TypeId};

use crate::comm::{Communicator, InFlight, NcclComm, Operation, Summed};
use crate::error::ShardError;
use burn_backend::{Backend, DType, TensorMetadata};
use burn_cubecl::CubeRuntime;
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::tensor::CubeTensor;
use burn_float8::backend::{DeviceOperand, Float8Backend};
use burn_float8::shard_hooks::Exchange;
use burn_std::Shape;
use cubecl::Runtime;
use cubecl::client::ComputeClient;
use cubecl::cuda::{CudaDevice, CudaRuntime};
use cubecl::server::Handle;

use super::joined::Joined;
use super::words_of;
use crate::collectives::{DeviceCollectives, PendingOnDevice, Shards};

struct Nccl {
    comm: Communicator,
    cuda: ComputeClient<CudaRuntime>,
}

/// Collectives of `comm` if NCCL connects this device.
pub(super) fn collectives<R, B>(device: &R::Device, comm: &Communicator) -> Option<Box<dyn DeviceCollectives<B>>>
where
    R: CubeRuntime,
    B: Float8Backend<Operand = DeviceOperand<B>>
        + Backend<FloatTensorPrimitive = CubeTensor<R>, IntTensorPrimitive = CubeTensor<R>>,
{
    let connected = comm.nccl()?.device();
    let device: &CudaDevice = (device as &dyn Any).downcast_ref()?;
    if TypeId::of::<R>() != TypeId::of::<CudaRuntime>() || device.index != connected {
        return None;
    }
    Some(Box::new(Nccl { comm: comm.clone(), cuda: CudaRuntime::client(device) }))
}

/// Collectives in flight, with the memory that they read and write.
struct Launched<R: CubeRuntime> {
    // Dropped before the tensors: the device then waits before it reuses their memory.
    flight: InFlight,
    read: Vec<CubeTensor<R>>,
    written: Vec<CubeTensor<R>>,
}

impl<R: CubeRuntime> Launched<R> {
    fn land(self) -> Result<Vec<CubeTensor<R>>, ShardError> {
        let Self { flight, read, written } = self;
        flight.land()?;
        drop(read);
        Ok(written)
    }
}

/// Number of whole words in the tensor. Bounded by its bytes, so that no call accesses memory
/// beyond them for any dtype.
fn words<R: CubeRuntime>(t: &CubeTensor<R>) -> usize {
    t.shape().num_elements() * t.dtype.size() / 4
}

impl Nccl {
    fn nccl(&self) -> &NcclComm {
        self.comm.nccl().expect("made with NCCL")
    }

    /// Starts the collective from each tensor, with its count of words or elements on one rank, into
    /// a new tensor.
    fn launch<R: CubeRuntime>(
        &self,
        operation: Operation,
        label: &str,
        buffers: Vec<(CubeTensor<R>, Shape, usize)>,
    ) -> Result<Launched<R>, ShardError> {
        let is_bf16 = operation == Operation::ReduceScatterSum && buffers[0].0.dtype == DType::BF16;
        let call = (operation, if is_bf16 { Summed::Bf16 } else { Summed::F32 });
        let (mut read, mut written, mut calls) = (vec![], vec![], vec![]);
        for (from, shape, count) in buffers {
            let from = into_contiguous(from);
            let handle = from.client.empty(shape.num_elements() * from.dtype.size());
            let to = CubeTensor::new_contiguous(from.client.clone(), from.device.clone(), shape, handle, from.dtype);
            calls.push(((self.address(&from.handle)?, self.address(&to.handle)?), count));
            read.push(from);
            written.push(to);
        }
        // SAFETY: each address is a tensor's on the communicator's device and covers all elements
        // that the call accesses. `Launched` holds the handles until the context waits for the
        // stream. `address` waits for CubeCL's thread, so the context has received all writes to
        // the tensors. Nothing reads the new tensors before `land`, and a tensor whose handle is
        // held is not written in place.
        let flight = unsafe {
            self.nccl().after_context(label, |stream| {
                calls
                    .iter()
                    .try_for_each(|(addresses, count)| self.nccl().collective(call, label, *addresses, *count, stream))
            })
        }?;
        Ok(Launched { flight, read, written })
    }

    /// Address of a handle's memory, after CubeCL has launched all work that this thread requested.
    fn address(&self, handle: &Handle) -> Result<u64, ShardError> {
        let found = self.cuda.get_resource(handle.clone());
        let found = found.map_err(|error| ShardError::Cuda { rank: self.comm.rank(), reason: error.to_string() })?;
        Ok(found.resource().ptr)
    }
}

impl<R, B> DeviceCollectives<B> for Nccl
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
        let (joined, ranks) = (Joined::new(shard, shards), self.comm.world_size());
        let buffer = |part: CubeTensor<R>| {
            let (dims, words) = (part.shape(), words(&part));
            (part, Shape::from(vec![ranks, dims[0], dims[1]]), words)
        };
        let launched = self.launch(Operation::AllGather, label, joined.parts().into_iter().map(buffer).collect())?;
        Ok(Box::new(move || Ok(joined.join(launched.land()?))))
    }

    fn start(
        &self,
        operation: Operation,
        label: &str,
        values: CubeTensor<R>,
    ) -> Result<PendingOnDevice<CubeTensor<R>>, ShardError> {
        let (ranks, words) = (self.comm.world_size(), words(&values));
        let mut shape = values.shape();
        shape[0] = operation.rows_on_device(shape[0], ranks);
        let count = match operation {
            Operation::ReduceScatterSum => words / ranks * if values.dtype == DType::BF16 { 2 } else { 1 },
            _ => words,
        };
        let launched = self.launch(operation, label, vec![(values, shape, count)])?;
        Ok(Box::new(move || Ok(launched.land()?.remove(0))))
    }

    fn all_to_all(&self, label: &str, rows: CubeTensor<R>, exchange: &Exchange) -> Result<CubeTensor<R>, ShardError> {
        let (from, received) = (into_contiguous(rows), exchange.received.iter().sum::<usize>());
        let (shape, size) = (Shape::from(vec![received.max(1), from.shape()[1]]), from.dtype.size());
        let handle = match received {
            0 => from.client.create_from_slice(&vec![0; shape.num_elements() * size]),
            _ => from.client.empty(shape.num_elements() * size),
        };
        let to = CubeTensor::new_contiguous(from.client.clone(), from.device.clone(), shape, handle, from.dtype);
        let (send, receive) = (self.address(&from.handle)?, self.address(&to.handle)?);
        let words = words_of(&from, exchange);
        // SAFETY: as in `launch`. The rows of the exchange are rows of the tensors.
        let flight = unsafe {
            self.nccl().after_context(label, |stream| self.nccl().all_to_all_v(label, send, receive, &words, stream))
        }?;
        Ok(Launched { flight, read: vec![from], written: vec![to] }.land()?.remove(0))
    }
}
