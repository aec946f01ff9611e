//! Collectives of NCCL on device addresses.

use std::ffi::c_void;

use cudarc::nccl::sys::{self, ncclDataType_t, ncclRedOp_t};

use super::comm::{Call, NcclComm};
use crate::collective::Operation;
use crate::error::CommError;
use crate::traffic::received;

impl NcclComm {
    /// Gathers `words` 4-byte words of each rank at `receive`, in rank order.
    ///
    /// # Errors
    /// NCCL's errors; a difference in the compare mode.
    ///
    /// # Safety
    /// `send` is the address of `words` words, `receive` of room for the words of all ranks, on
    /// this rank's device. Until `stream` has passed this call, both stay allocated, nothing else
    /// writes to `send`, and nothing else uses `receive`. They do not overlap, except that `send`
    /// may be this rank's part of `receive`. `stream` is a stream of the device's primary context.
    pub unsafe fn all_gather(
        &self,
        label: &str,
        (send, receive): (u64, u64),
        words: usize,
        stream: *mut c_void,
    ) -> Result<(), CommError> {
        let call = self.call(Operation::AllGather, label, 4 * words);
        // SAFETY: guaranteed by the caller; NCCL counts the elements of one rank.
        self.start(&call, |comm| unsafe {
            let (from, to) = (send as *const c_void, receive as *mut c_void);
            sys::ncclAllGather(from, to, words, ncclDataType_t::ncclUint32, comm, stream.cast())
        })
    }

    /// Sums `world_size * chunk` f32 over all ranks; this rank's chunk is written to `receive`.
    ///
    /// # Errors
    /// NCCL's errors; a difference in the compare mode.
    ///
    /// # Safety
    /// As [`all_gather`](Self::all_gather), with `world_size * chunk` f32 at `send` and room for
    /// `chunk` at `receive`, which may be this rank's part of `send`.
    pub unsafe fn reduce_scatter_sum_f32(
        &self,
        label: &str,
        (send, receive): (u64, u64),
        chunk: usize,
        stream: *mut c_void,
    ) -> Result<(), CommError> {
        // SAFETY: guaranteed by the caller.
        unsafe { self.reduce_scatter((ncclDataType_t::ncclFloat32, 4), label, (send, receive), chunk, stream) }
    }

    /// Sums `world_size * chunk` bf16 over all ranks in bf16: NCCL rounds each partial sum.
    ///
    /// # Errors
    /// NCCL's errors; a difference in the compare mode.
    ///
    /// # Safety
    /// As [`reduce_scatter_sum_f32`](Self::reduce_scatter_sum_f32), with bf16.
    pub unsafe fn reduce_scatter_sum_bf16(
        &self,
        label: &str,
        addresses: (u64, u64),
        chunk: usize,
        stream: *mut c_void,
    ) -> Result<(), CommError> {
        // SAFETY: guaranteed by the caller.
        unsafe { self.reduce_scatter((ncclDataType_t::ncclBfloat16, 2), label, addresses, chunk, stream) }
    }

    unsafe fn reduce_scatter(
        &self,
        (number, size): (ncclDataType_t, usize),
        label: &str,
        (send, receive): (u64, u64),
        chunk: usize,
        stream: *mut c_void,
    ) -> Result<(), CommError> {
        let call = self.call(Operation::ReduceScatterSum, label, size * chunk * self.world_size);
        // SAFETY: guaranteed by the caller; NCCL counts the elements that a rank receives.
        self.start(&call, |comm| unsafe {
            let (from, to) = (send as *const c_void, receive as *mut c_void);
            sys::ncclReduceScatter(from, to, chunk, number, ncclRedOp_t::ncclSum, comm, stream.cast())
        })
    }

    /// Sums `count` f32 over all ranks.
    ///
    /// # Errors
    /// NCCL's errors; a difference in the compare mode.
    ///
    /// # Safety
    /// As [`all_gather`](Self::all_gather), with `count` f32 at `send` and `receive`, which may be
    /// the same.
    pub unsafe fn all_reduce_sum_f32(
        &self,
        label: &str,
        addresses: (u64, u64),
        count: usize,
        stream: *mut c_void,
    ) -> Result<(), CommError> {
        let kind = (Operation::AllReduceSum, ncclDataType_t::ncclFloat32, ncclRedOp_t::ncclSum);
        // SAFETY: guaranteed by the caller.
        unsafe { self.all_reduce(kind, label, addresses, count, stream) }
    }

    /// Maximum of `count` u32 over all ranks. For the bits of floats with sign 0, NaN exceeds all
    /// others.
    ///
    /// # Errors
    /// NCCL's errors; a difference in the compare mode.
    ///
    /// # Safety
    /// As [`all_reduce_sum_f32`](Self::all_reduce_sum_f32).
    pub unsafe fn all_reduce_max_u32(
        &self,
        label: &str,
        addresses: (u64, u64),
        count: usize,
        stream: *mut c_void,
    ) -> Result<(), CommError> {
        let kind = (Operation::AllReduceMaxBits, ncclDataType_t::ncclUint32, ncclRedOp_t::ncclMax);
        // SAFETY: guaranteed by the caller.
        unsafe { self.all_reduce(kind, label, addresses, count, stream) }
    }

    unsafe fn all_reduce(
        &self,
        (operation, number, op): (Operation, ncclDataType_t, ncclRedOp_t),
        label: &str,
        (send, receive): (u64, u64),
        count: usize,
        stream: *mut c_void,
    ) -> Result<(), CommError> {
        let call = self.call(operation, label, 4 * count);
        // SAFETY: guaranteed by the caller; both types have 4 bytes.
        self.start(&call, |comm| unsafe {
            let (from, to) = (send as *const c_void, receive as *mut c_void);
            sys::ncclAllReduce(from, to, count, number, op, comm, stream.cast())
        })
    }

    /// Copies `words` 4-byte words from `send` of rank `root` to `receive` of all ranks.
    ///
    /// # Errors
    /// [`CommError::NoSuchRoot`]; NCCL's errors; a difference in the compare mode.
    ///
    /// # Safety
    /// As [`all_gather`](Self::all_gather), with `words` words at `send`, which only rank `root`
    /// reads, and at `receive`. Both may be the same address.
    pub unsafe fn broadcast(
        &self,
        label: &str,
        root: usize,
        (send, receive): (u64, u64),
        words: usize,
        stream: *mut c_void,
    ) -> Result<(), CommError> {
        let world_size = self.world_size;
        if root >= world_size {
            return Err(CommError::NoSuchRoot { label: label.into(), root, world_size });
        }
        let bytes = 4 * words;
        let (sent, received) = if self.rank() == root { (bytes, 0) } else { (0, bytes as u64) };
        let call = Call { operation: Operation::Broadcast, label, sent, received, bytes };
        // SAFETY: guaranteed by the caller, and the root is a rank.
        self.start(&call, |comm| unsafe {
            let (from, to) = (send as *const c_void, receive as *mut c_void);
            sys::ncclBroadcast(from, to, words, ncclDataType_t::ncclUint32, root as i32, comm, stream.cast())
        })
    }

    fn call<'a>(&self, operation: Operation, label: &'a str, bytes: usize) -> Call<'a> {
        let received = received(operation, bytes as u64, self.world_size as u64);
        Call { operation, label, sent: bytes, received, bytes }
    }
}
