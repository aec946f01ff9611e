//! MPI calls of each collective, on buffers that stay alive while MPI uses them.

use std::ffi::c_int;
use std::mem;
use std::sync::Arc;

use ::mpi::ffi::{self, MPI_Comm, MPI_Op, MPI_Request};

use super::element::Element;
use super::wire::{ENCODED, decode, encode};
use super::world::{Orphan, State, World, check};
use crate::collective::{Collective, Difference, Operation};
use crate::error::CommError;
use crate::pending::{Flight, Pending};

/// Started collective with its buffers.
struct InFlight<T: Element> {
    world: Arc<World>,
    collective: Collective,
    /// Null when the transfer is done.
    request: MPI_Request,
    send: Vec<T>,
    receive: Vec<T>,
}

// SAFETY: the handle is used with the world's lock held, see `State`.
unsafe impl<T: Element> Send for InFlight<T> {}

impl<T: Element> Flight<Vec<T>> for InFlight<T> {
    fn land(mut self: Box<Self>) -> Result<Vec<T>, CommError> {
        let this = &mut *self;
        let waited = this.world.wait(&mut this.request, &this.collective);
        let (send, receive) = (mem::take(&mut this.send), mem::take(&mut this.receive));
        match waited {
            Ok(()) => Ok(receive),
            Err(error) => {
                // Leaked: a failed request is no longer a request, and parts of it may still be in
                // flight.
                mem::forget((send, receive));
                Err(error)
            }
        }
    }
}

impl<T: Element> Drop for InFlight<T> {
    fn drop(&mut self) {
        // SAFETY: a constant of the library.
        let null = unsafe { ffi::RSMPI_REQUEST_NULL };
        if self.request != null {
            let buffers = Box::new((mem::take(&mut self.send), mem::take(&mut self.receive)));
            self.world.lock().orphans.push(Orphan { request: self.request, _buffers: buffers });
        }
    }
}

impl World {
    /// Numbers the next collective and checks that all ranks are in the same one. The caller holds
    /// `order`.
    ///
    /// MPI matches collectives only by their order. On a mismatch it would overwrite memory behind
    /// a receive buffer that is too small.
    fn begin(&self, operation: Operation, label: &str, bytes: usize) -> Result<Collective, CommError> {
        let collective = self.number(operation, label, bytes)?;
        self.compare(&collective)?;
        Ok(collective)
    }

    fn number(&self, operation: Operation, label: &str, bytes: usize) -> Result<Collective, CommError> {
        let mut state = self.lock();
        state.alive()?;
        state.started += 1;
        Ok(Collective { number: state.started, operation, label: label.into(), bytes: bytes as u64 })
    }

    /// Numbers a collective of another engine. In the compare mode, also compares it.
    #[cfg(feature = "nccl")]
    pub(crate) fn announce(&self, operation: Operation, label: &str, bytes: usize) -> Result<Collective, CommError> {
        let _order = self.order.lock();
        let collective = self.number(operation, label, bytes)?;
        if self.compare {
            self.compare(&collective)?;
        }
        Ok(collective)
    }

    fn compare(&self, own: &Collective) -> Result<(), CommError> {
        let all = self.gather_now(own, encode(own).to_vec())?;
        let (each, _) = all.as_chunks::<ENCODED>();
        let Some(rank) = each.iter().position(|other| *other != each[0]) else { return Ok(()) };
        // A record that cannot be decoded comes from another version of this program.
        let [first, other] = [0, rank].map(|rank| decode(&each[rank]).unwrap_or_else(|| own.clone()));
        let error = CommError::Differs(Box::new(Difference { rank, first, other }));
        Err(self.die(&mut self.lock(), own, error))
    }

    /// Gathers equal lengths and waits, as a part of `collective`.
    fn gather_now<T: Element>(&self, collective: &Collective, send: Vec<T>) -> Result<Vec<T>, CommError> {
        let mut receive = vec![T::default(); send.len() * self.size];
        let started = self.start(collective, |comm, request| {
            let count = send.len() as c_int;
            // SAFETY: the receive buffer has room for each rank's elements; both live until the
            // request is done, or are leaked.
            unsafe {
                let (from, to) = (send.as_ptr().cast(), receive.as_mut_ptr().cast());
                ffi::MPI_Iallgather(from, count, T::datatype(), to, count, T::datatype(), comm, request)
            }
        });
        self.finish(started, collective, (send, receive)).map(|(_, receive)| receive)
    }

    /// Waits for a started part. Leaks its buffers if it does not end.
    fn finish<B>(
        &self,
        started: Result<MPI_Request, CommError>,
        collective: &Collective,
        buffers: B,
    ) -> Result<B, CommError> {
        let waited = started.and_then(|mut request| self.wait(&mut request, collective));
        match waited {
            Ok(()) => Ok(buffers),
            Err(error) => {
                mem::forget(buffers);
                Err(error)
            }
        }
    }

    fn start(
        &self,
        collective: &Collective,
        call: impl FnOnce(MPI_Comm, *mut MPI_Request) -> c_int,
    ) -> Result<MPI_Request, CommError> {
        let state: &mut State = &mut self.lock();
        // SAFETY: a constant of the library.
        let mut request = unsafe { ffi::RSMPI_REQUEST_NULL };
        check(collective, call(state.data, &mut request)).map_err(|error| self.die(state, collective, error))?;
        Ok(request)
    }

    fn launch<T: Element>(
        self: &Arc<Self>,
        (operation, label): (Operation, &str),
        (send, mut receive): (Vec<T>, Vec<T>),
        call: impl FnOnce(*const T, *mut T, MPI_Comm, *mut MPI_Request) -> c_int,
    ) -> Result<Pending<Vec<T>>, CommError> {
        fits(operation, label, send.len().max(receive.len()))?;
        // A broadcast uses only its result buffer.
        let bytes = size_of::<T>() * if operation == Operation::Broadcast { receive.len() } else { send.len() };
        let _order = self.order.lock();
        let collective = self.begin(operation, label, bytes)?;
        let (from, to) = (send.as_ptr(), receive.as_mut_ptr());
        let request = self.start(&collective, |comm, request| call(from, to, comm, request))?;
        Ok(Pending::flight(InFlight { world: Arc::clone(self), collective, request, send, receive }))
    }

    pub(crate) fn all_gather(self: &Arc<Self>, label: &str, shard: Vec<u32>) -> Result<Pending<Vec<u32>>, CommError> {
        let count = shard.len() as c_int;
        let all = vec![0; shard.len() * self.size];
        self.launch((Operation::AllGather, label), (shard, all), |from, to, comm, request| {
            let datatype = u32::datatype();
            // SAFETY: `to` has room for `count` words of each rank; both buffers live until the
            // request is done.
            unsafe { ffi::MPI_Iallgather(from.cast(), count, datatype, to.cast(), count, datatype, comm, request) }
        })
    }

    pub(crate) fn all_to_all(self: &Arc<Self>, label: &str, words: Vec<u32>) -> Result<Pending<Vec<u32>>, CommError> {
        let (count, all) = ((words.len() / self.size) as c_int, vec![0; words.len()]);
        self.launch((Operation::AllToAll, label), (words, all), |from, to, comm, request| {
            let datatype = u32::datatype();
            // SAFETY: both buffers hold `count` words for each rank and live until the request is
            // done.
            unsafe { ffi::MPI_Ialltoall(from.cast(), count, datatype, to.cast(), count, datatype, comm, request) }
        })
    }

    pub(crate) fn reduce_scatter_sum(
        self: &Arc<Self>,
        label: &str,
        all: Vec<f32>,
    ) -> Result<Pending<Vec<f32>>, CommError> {
        let chunk = vec![0.0; all.len() / self.size];
        let count = chunk.len() as c_int;
        self.launch((Operation::ReduceScatterSum, label), (all, chunk), |from, to, comm, request| {
            // SAFETY: `from` holds `count` numbers for each rank; `to` has room for one rank's.
            unsafe {
                let (datatype, sum) = (f32::datatype(), ffi::RSMPI_SUM);
                ffi::MPI_Ireduce_scatter_block(from.cast(), to.cast(), count, datatype, sum, comm, request)
            }
        })
    }

    pub(crate) fn all_reduce<T: Element>(
        self: &Arc<Self>,
        operation: Operation,
        label: &str,
        all: Vec<T>,
    ) -> Result<Pending<Vec<T>>, CommError> {
        // SAFETY: constants of the library.
        let op: MPI_Op =
            unsafe { if operation == Operation::AllReduceMaxBits { ffi::RSMPI_MAX } else { ffi::RSMPI_SUM } };
        let (count, result) = (all.len() as c_int, vec![T::default(); all.len()]);
        self.launch((operation, label), (all, result), |from, to, comm, request| {
            // SAFETY: both buffers have `count` numbers.
            unsafe { ffi::MPI_Iallreduce(from.cast(), to.cast(), count, T::datatype(), op, comm, request) }
        })
    }

    pub(crate) fn broadcast(
        self: &Arc<Self>,
        label: &str,
        root: usize,
        words: Vec<u32>,
    ) -> Result<Pending<Vec<u32>>, CommError> {
        let count = words.len() as c_int;
        self.launch((Operation::Broadcast, label), (Vec::new(), words), |_, to, comm, request| {
            // SAFETY: the buffer has `count` words.
            unsafe { ffi::MPI_Ibcast(to.cast(), count, u32::datatype(), root as c_int, comm, request) }
        })
    }

    pub(crate) fn barrier(&self, label: &str) -> Result<(), CommError> {
        let _order = self.order.lock();
        let collective = self.begin(Operation::Barrier, label, 0)?;
        // SAFETY: a barrier has no buffers.
        let started = self.start(&collective, |comm, request| unsafe { ffi::MPI_Ibarrier(comm, request) });
        self.finish(started, &collective, ())
    }

    pub(crate) fn all_gather_bytes(&self, label: &str, bytes: &[u8]) -> Result<Vec<Vec<u8>>, CommError> {
        let _order = self.order.lock();
        let collective = self.begin(Operation::AllGatherBytes, label, 0)?;
        let lengths = self.gather_now(&collective, vec![bytes.len() as u64])?;
        let lengths: Vec<usize> = lengths.into_iter().map(|length| length as usize).collect();
        // The check gives the same result on every rank, so no rank waits for one that stopped
        // here.
        fits(Operation::AllGatherBytes, label, lengths.iter().sum())?;
        // Open MPI rejects a gather whose lengths are all zero.
        if lengths.iter().all(|length| *length == 0) {
            return Ok(vec![Vec::new(); self.size]);
        }
        let counts: Vec<c_int> = lengths.iter().map(|length| *length as c_int).collect();
        let starts: Vec<c_int> = counts
            .iter()
            .scan(0, |next, count| {
                *next += count;
                Some(*next - count)
            })
            .collect();
        let send = bytes.to_vec();
        let mut receive = vec![0_u8; lengths.iter().sum()];
        let started = self.start(&collective, |comm, request| {
            let (from, count, datatype) = (send.as_ptr().cast(), send.len() as c_int, u8::datatype());
            let (to, counts, starts) = (receive.as_mut_ptr().cast(), counts.as_ptr(), starts.as_ptr());
            // SAFETY: rank r's bytes go to `receive[starts[r]..][..counts[r]]`; all buffers live
            // until the request is done.
            unsafe { ffi::MPI_Iallgatherv(from, count, datatype, to, counts, starts, datatype, comm, request) }
        });
        let (_, all, _, starts) = self.finish(started, &collective, (send, receive, counts, starts))?;
        Ok(starts.iter().zip(lengths).map(|(start, length)| all[*start as usize..][..length].to_vec()).collect())
    }
}

/// MPI counts elements in a C int, and some of its algorithms count all ranks' elements in one.
fn fits(operation: Operation, label: &str, elements: usize) -> Result<(), CommError> {
    let limit = c_int::MAX as usize;
    if elements <= limit {
        return Ok(());
    }
    Err(CommError::TooLong { operation: operation.name(), label: label.into(), elements, limit })
}
