//! Messages of ranks outside their collectives: a rank has given up, or leaves.

use std::ffi::c_int;

use ::mpi::ffi;
use ::mpi::traits::{AsRaw, Communicator as _, Source as _};

use super::wire::{ENCODED, encode};
use super::world::{Orphan, State, World, check};
use crate::comm::collective::Collective;
use crate::error::ShardError;

/// Tag of "I have given up waiting in this collective".
const GIVEN_UP: c_int = 1;
/// Tag of "I leave after this collective". Only the number of the collective is sent.
const LEAVING: c_int = 2;

impl World {
    /// Notifies the other ranks that this rank has given up in `collective`.
    pub(super) fn tell_given_up(&self, state: &mut State, collective: &Collective) -> Result<(), ShardError> {
        state.called = true;
        self.tell(state, GIVEN_UP, encode(collective))
    }

    /// Notifies the other ranks that this rank starts no more collectives.
    pub(super) fn tell_leaving(&self, state: &mut State) -> Result<(), ShardError> {
        let mut record = [0; ENCODED];
        record[..8].copy_from_slice(&state.started.to_le_bytes());
        self.tell(state, LEAVING, record)
    }

    fn tell(&self, state: &mut State, tag: c_int, record: [u8; ENCODED]) -> Result<(), ShardError> {
        for to in (0..self.size).filter(|rank| *rank != self.rank) {
            let buffer = record.to_vec();
            // SAFETY: the buffer lives with the request and is not modified.
            let (code, request) = unsafe {
                let (data, datatype, comm) = (buffer.as_ptr().cast(), ffi::RSMPI_UINT8_T, state.control.as_raw());
                let mut request = ffi::RSMPI_REQUEST_NULL;
                (ffi::MPI_Isend(data, ENCODED as c_int, datatype, to as c_int, tag, comm, &mut request), request)
            };
            check("MPI_Isend", code)?;
            state.orphans.push(Orphan { request, _buffers: Box::new(buffer) });
        }
        Ok(())
    }

    /// Reads the messages of other ranks.
    pub(super) fn read_messages(&self, state: &mut State) {
        while let Some((message, status)) = state.control.any_process().immediate_matched_probe() {
            let mut record = [0_u8; ENCODED];
            message.matched_receive_into(&mut record[..]);
            let from = status.source_rank() as usize;
            match status.tag() {
                LEAVING => state.left[from] = Some(u64::from_le_bytes(*record.first_chunk().expect("8 bytes"))),
                _ => state.calls[from] = Some(record),
            }
        }
    }
}
