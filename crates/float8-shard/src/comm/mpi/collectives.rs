//! MPI calls of each collective, on buffers that stay alive while MPI uses them.

use std::ffi::c_int;
use std::mem;

use ::mpi::datatype::Equivalence;
use ::mpi::ffi::{self, MPI_Request};
use ::mpi::traits::AsRaw;
use burn_float8::shard_hooks::Exchange;

use super::wire::{ENCODED, decode, encode};
use super::world::{Group, Orphan, check};
use crate::comm::collective::{Collective, Difference, Operation};
use crate::comm::pending::{Flight, Pending};
use crate::error::ShardError;

/// Number type of MPI.
pub(in crate::comm) trait Element: Equivalence + Copy + Default + Send + 'static {}
impl<T: Equivalence + Copy + Default + Send + 'static> Element for T {}

/// Started collective with its buffers.
struct MpiInFlight<T: Element> {
    group: Group,
    collective: Collective,
    /// Null when the transfer is done.
    request: MPI_Request,
    send: Vec<T>,
    receive: Vec<T>,
    counts: Counts,
}

/// Elements for each rank and from each rank, where these differ.
#[derive(Default)]
struct Counts {
    sent: Vec<c_int>,
    sent_begins: Vec<c_int>,
    received: Vec<c_int>,
    received_begins: Vec<c_int>,
}

// SAFETY: the handle is used with the world's lock held, see `Comm`.
unsafe impl<T: Element> Send for MpiInFlight<T> {}

/// Memory that a transfer uses.
type Buffers<T> = (Vec<T>, Vec<T>, Counts);

impl<T: Element> MpiInFlight<T> {
    fn buffers(&mut self) -> Buffers<T> {
        (mem::take(&mut self.send), mem::take(&mut self.receive), mem::take(&mut self.counts))
    }
}

impl<T: Element> Flight<Vec<T>> for MpiInFlight<T> {
    fn land(mut self: Box<Self>) -> Result<Vec<T>, ShardError> {
        let this = &mut *self;
        let waited = this.group.wait(&mut this.request, &this.collective);
        let (send, receive, counts) = this.buffers();
        match waited {
            Ok(()) => Ok(receive),
            Err(error) => {
                // Leaked: a failed request is no longer a request, and parts of it may still be in
                // flight.
                mem::forget((send, receive, counts));
                Err(error)
            }
        }
    }
}

impl<T: Element> Drop for MpiInFlight<T> {
    fn drop(&mut self) {
        // SAFETY: a constant of the library.
        let null = unsafe { ffi::RSMPI_REQUEST_NULL };
        if self.request != null {
            let buffers = Box::new(self.buffers());
            self.group.world.lock().orphans.push(Orphan { request: self.request, _buffers: buffers });
        }
    }
}

impl Group {
    /// Starts a collective that all ranks of the group are in.
    pub(in crate::comm) fn start<T: Element>(
        &self,
        operation: Operation,
        label: &str,
        send: Vec<T>,
    ) -> Result<Pending<Vec<T>>, ShardError> {
        let ranks = if operation == Operation::AllGather { self.size() } else { 1 };
        fits(operation, label, ranks * send.len())?;
        let _order = self.world.order.lock();
        let collective = self.begin(operation, label, size_of_val(&send[..]))?;
        Ok(Pending::flight(self.transfer(operation, &collective, send)?))
    }

    /// Starts an exchange. Each pair of ranks has agreed on a number of elements.
    pub(in crate::comm) fn all_to_all_v<T: Element>(
        &self,
        label: &str,
        send: Vec<T>,
        Exchange { sent, received }: Exchange,
    ) -> Result<Pending<Vec<T>>, ShardError> {
        let [all_sent, all_received] = [&sent, &received].map(|counts| counts.iter().sum::<usize>());
        assert!(all_sent == send.len() && [sent.len(), received.len()] == [self.size(); 2], "counts of each rank");
        fits(Operation::AllToAll, label, all_sent.max(all_received))?;
        let _order = self.world.order.lock();
        // Ranks may give different amounts, so none is compared.
        let collective = self.begin(Operation::AllToAll, label, 0)?;
        let ints = |counts: Vec<usize>| counts.into_iter().map(|count| count as c_int).collect();
        let [sent_begins, received_begins] = [&sent, &received].map(|counts| ints(Exchange::begins(counts)));
        let counts = Counts { sent: ints(sent), sent_begins, received: ints(received), received_begins };
        let mut receive = vec![T::default(); all_received];
        let state = &mut self.world.lock();
        // SAFETY: `send` and `receive` have the lengths of the counts. All buffers live until the request is
        // done, or are leaked.
        let (code, request) = unsafe {
            let Counts { sent, sent_begins, received, received_begins } = &counts;
            let [sent, sent_at, received, received_at] =
                [sent, sent_begins, received, received_begins].map(|counts| counts.as_ptr());
            let (from, to) = (send.as_ptr().cast(), receive.as_mut_ptr().cast());
            let (of, mut request) = (T::equivalent_datatype().as_raw(), ffi::RSMPI_REQUEST_NULL);
            let (comm, out) = (self.comm.0, &mut request);
            let code = ffi::MPI_Ialltoallv(from, sent, sent_at, of, to, received, received_at, of, comm, out);
            (code, request)
        };
        check(&collective, code).map_err(|error| self.world.die(state, &collective, error))?;
        Ok(Pending::flight(MpiInFlight { group: self.clone(), collective, request, send, receive, counts }))
    }

    pub(in crate::comm) fn all_gather_bytes(&self, label: &str, bytes: &[u8]) -> Result<Vec<Vec<u8>>, ShardError> {
        let _order = self.world.order.lock();
        // Ranks may give different lengths, so none is compared.
        let collective = self.begin(Operation::AllGatherBytes, label, 0)?;
        let lengths = self.gather_now(&collective, vec![bytes.len() as u64])?;
        let longest = lengths.iter().max().map_or(0, |longest| *longest as usize);
        // The check gives the same result on every rank, so no rank waits for one that stopped
        // here.
        fits(Operation::AllGatherBytes, label, longest * self.size())?;
        // The address of no bytes is MPI_IN_PLACE in Open MPI.
        if longest == 0 {
            return Ok(vec![vec![]; self.size()]);
        }
        let mut padded = bytes.to_vec();
        padded.resize(longest, 0);
        let all = self.gather_now(&collective, padded)?;
        let of = |(rank, length)| all[rank * longest..][..length as usize].to_vec();
        Ok(lengths.into_iter().enumerate().map(of).collect())
    }

    /// Numbers the next collective and checks that all ranks of the group are in the same one. The
    /// caller holds `order`.
    ///
    /// MPI matches collectives only by their order. On a mismatch it would overwrite memory behind
    /// a receive buffer that is too small.
    fn begin(&self, operation: Operation, label: &str, bytes: usize) -> Result<Collective, ShardError> {
        let number = {
            let mut state = self.world.lock();
            state.alive()?;
            state.started += 1;
            state.started
        };
        let collective = Collective { number, operation, label: label.into(), bytes: bytes as u64 };
        let all = self.gather_now(&collective, encode(&collective).to_vec())?;
        let (each, _) = all.as_chunks::<ENCODED>();
        let Some(other) = each.iter().position(|other| *other != each[0]) else { return Ok(collective) };
        // A record that cannot be decoded comes from another version of this program.
        let read = |rank: usize| decode(&each[rank]).unwrap_or_else(|| collective.clone());
        let ranks = [self.members[0], self.members[other]];
        let error = ShardError::Differs(Box::new(Difference { ranks, first: read(0), other: read(other) }));
        Err(self.world.die(&mut self.world.lock(), &collective, error))
    }

    /// Gathers equal lengths and waits, as a part of `collective`.
    fn gather_now<T: Element>(&self, collective: &Collective, send: Vec<T>) -> Result<Vec<T>, ShardError> {
        Box::new(self.transfer(Operation::AllGather, collective, send)?).land()
    }

    /// Starts the transfer of a collective, or of a part of it.
    fn transfer<T: Element>(
        &self,
        operation: Operation,
        collective: &Collective,
        send: Vec<T>,
    ) -> Result<MpiInFlight<T>, ShardError> {
        let (len, ranks) = (send.len(), self.size());
        let (count, received) = match operation {
            Operation::AllGather | Operation::AllGatherBytes => (len, len * ranks),
            Operation::AllToAll => (len / ranks, len),
            Operation::ReduceScatterSum => (len / ranks, len / ranks),
            Operation::AllReduceSum | Operation::AllReduceMaxBits => (len, len),
        };
        let (mut receive, count) = (vec![T::default(); received], count as c_int);
        let state = &mut self.world.lock();
        // SAFETY: `send` and `receive` have the lengths that the call reads and writes, as computed
        // above. Both live until the request is done, or are leaked.
        let (code, request) = unsafe {
            let (from, to, comm) = (send.as_ptr().cast(), receive.as_mut_ptr().cast(), self.comm.0);
            let (of, mut request) = (T::equivalent_datatype().as_raw(), ffi::RSMPI_REQUEST_NULL);
            let out = &mut request;
            let code = match operation {
                Operation::AllGather | Operation::AllGatherBytes => {
                    ffi::MPI_Iallgather(from, count, of, to, count, of, comm, out)
                }
                Operation::AllToAll => ffi::MPI_Ialltoall(from, count, of, to, count, of, comm, out),
                Operation::ReduceScatterSum => {
                    ffi::MPI_Ireduce_scatter_block(from, to, count, of, ffi::RSMPI_SUM, comm, out)
                }
                Operation::AllReduceSum => ffi::MPI_Iallreduce(from, to, count, of, ffi::RSMPI_SUM, comm, out),
                Operation::AllReduceMaxBits => ffi::MPI_Iallreduce(from, to, count, of, ffi::RSMPI_MAX, comm, out),
            };
            (code, request)
        };
        check(collective, code).map_err(|error| self.world.die(state, collective, error))?;
        Ok(MpiInFlight {
            group: self.clone(),
            collective: collective.clone(),
            request,
            send,
            receive,
            counts: Default::default(),
        })
    }
}

/// MPI counts elements in a C int, and some of its algorithms count all ranks' elements in one.
fn fits(operation: Operation, label: &str, elements: usize) -> Result<(), ShardError> {
    let limit = c_int::MAX as usize;
    if elements <= limit {
        return Ok(());
    }
    let reason =
        format!("{elements} elements of all ranks are more than MPI's limit of {limit} a call; split the call");
    Err(ShardError::Input { operation: operation.name(), label: label.into(), reason })
}
