//! Collectives of NCCL on device addresses.

use std::ffi::{c_int, c_void};

use burn_float8::shard_hooks::Exchange;
use cudarc::nccl::sys::{self, ncclDataType_t, ncclRedOp_t};

use super::comm::NcclComm;
use crate::comm::collective::Operation;
use crate::comm::traffic::received;
use crate::error::ShardError;

/// Type of the elements that NCCL sums.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Summed {
    F32,
    /// NCCL rounds each partial sum.
    Bf16,
}

impl NcclComm {
    /// Starts a collective on `stream`, a stream of the device's primary context:
    ///
    /// ```text
    /// all_gather            count words of each rank at send      the words of all ranks at receive, in rank order
    /// reduce_scatter_sum    ranks · count elements at send        this rank's count sums at receive
    /// all_reduce_sum        count f32 at send                     count sums at receive
    /// all_reduce_max_bits   count words at send                   count words at receive
    /// ```
    ///
    /// # Errors
    /// NCCL's errors.
    ///
    /// # Safety
    /// Both addresses cover these elements on this rank's device. Until `stream` has passed this
    /// call, both stay allocated, nothing else writes to `send`, and nothing else uses `receive`.
    /// They do not overlap.
    ///
    /// # Panics
    /// Panics for other operations.
    pub(crate) unsafe fn collective(
        &self,
        (operation, summed): (Operation, Summed),
        label: &str,
        (send, receive): (u64, u64),
        count: usize,
        stream: *mut c_void,
    ) -> Result<(), ShardError> {
        let (kind, size) = match summed {
            Summed::F32 => (ncclDataType_t::ncclFloat32, 4),
            Summed::Bf16 => (ncclDataType_t::ncclBfloat16, 2),
        };
        let (words, sum) = (ncclDataType_t::ncclUint32, ncclRedOp_t::ncclSum);
        let (from, to, stream) = (send as *const c_void, receive as *mut c_void, stream.cast());
        let parts = if operation == Operation::ReduceScatterSum { self.world_size } else { 1 };
        // SAFETY: guaranteed by the caller. NCCL counts the elements of one rank.
        let sent = (size * count * parts) as u64;
        self.start(operation, label, sent, received(operation, sent, self.world_size as u64), |comm| unsafe {
            match operation {
                Operation::AllGather => sys::ncclAllGather(from, to, count, words, comm, stream),
                Operation::ReduceScatterSum => sys::ncclReduceScatter(from, to, count, kind, sum, comm, stream),
                Operation::AllReduceSum => sys::ncclAllReduce(from, to, count, kind, sum, comm, stream),
                // Bits of floats with sign 0 have the order of the floats.
                Operation::AllReduceMaxBits => {
                    sys::ncclAllReduce(from, to, count, words, ncclRedOp_t::ncclMax, comm, stream)
                }
                other => unreachable!("{other} is not reduced or gathered on devices"),
            }
        })
    }

    /// Starts an exchange of words on `stream`: the first `sent[0]` at `send` go to rank 0. The words from
    /// all ranks are at `receive`, rank 0's first.
    ///
    /// # Errors
    /// NCCL's errors.
    ///
    /// # Safety
    /// As for [`collective`](Self::collective).
    pub(crate) unsafe fn all_to_all_v(
        &self,
        label: &str,
        mut send: u64,
        mut receive: u64,
        Exchange { sent, received }: &Exchange,
        stream: *mut c_void,
    ) -> Result<(), ShardError> {
        let bytes = |words: usize| 4 * words as u64;
        let others = received.iter().sum::<usize>() - received[self.core.rank];
        // SAFETY: guaranteed by the caller. The end of a group returns the first error of its calls.
        self.start(Operation::AllToAll, label, bytes(sent.iter().sum()), bytes(others), |comm| unsafe {
            let (words, stream) = (ncclDataType_t::ncclUint32, stream.cast());
            sys::ncclGroupStart();
            for (rank, (sent, received)) in sent.iter().zip(received).enumerate() {
                sys::ncclSend(send as *const c_void, *sent, words, rank as c_int, comm, stream);
                sys::ncclRecv(receive as *mut c_void, *received, words, rank as c_int, comm, stream);
                (send, receive) = (send + bytes(*sent), receive + bytes(*received));
            }
            sys::ncclGroupEnd()
        })
    }
}
