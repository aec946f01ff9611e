//! Messages of ranks outside their collectives: a rank has given up, or leaves.

use std::ffi::c_int;

use ::mpi::ffi;

use super::wire::{ENCODED, encode};
use super::world::{Orphan, State, World, check};
use crate::collective::Collective;
use crate::error::CommError;

/// Tag of "I have given up waiting in this collective".
const GIVEN_UP: c_int = 1;
/// Tag of "I leave after this collective".
const LEAVING: c_int = 2;

impl World {
    /// Notifies the other ranks that this rank has given up in `collective`.
    pub(crate) fn tell_given_up(&self, state: &mut State, collective: &Collective) -> Result<(), CommError> {
        state.called = true;
        self.tell(state, GIVEN_UP, &encode(collective))
    }

    /// Notifies the other ranks that this rank starts no more collectives.
    pub(crate) fn tell_leaving(&self, state: &mut State) -> Result<(), CommError> {
        let started = state.started.to_le_bytes();
        self.tell(state, LEAVING, &started)
    }

    fn tell(&self, state: &mut State, tag: c_int, message: &[u8]) -> Result<(), CommError> {
        for to in (0..self.size).filter(|rank| *rank != self.rank) {
            let buffer = message.to_vec();
            // SAFETY: the buffer lives with the request and is not modified.
            let request = unsafe {
                let mut request = ffi::RSMPI_REQUEST_NULL;
                let (data, count, datatype) = (buffer.as_ptr().cast(), buffer.len() as c_int, ffi::RSMPI_UINT8_T);
                check(
                    "MPI_Isend",
                    ffi::MPI_Isend(data, count, datatype, to as c_int, tag, state.control, &mut request),
                )?;
                request
            };
            state.orphans.push(Orphan { request, _buffers: Box::new(buffer) });
        }
        Ok(())
    }

    /// Reads the messages of other ranks.
    pub(crate) fn read_messages(&self, state: &mut State) -> Result<(), CommError> {
        for from in (0..self.size).filter(|rank| *rank != self.rank) {
            let mut word = [0; 8];
            if read(state, from, LEAVING, &mut word)? {
                state.left[from] = Some(u64::from_le_bytes(word));
            }
            let mut record = [0; ENCODED];
            if read(state, from, GIVEN_UP, &mut record)? {
                state.calls[from] = Some(record);
            }
        }
        Ok(())
    }
}

/// Receives a message if there is one; returns whether there was.
fn read(state: &State, from: usize, tag: c_int, into: &mut [u8]) -> Result<bool, CommError> {
    // SAFETY: a probed message is received without waiting; all messages of a tag have the buffer's
    // length.
    unsafe {
        let (mut there, comm, status) = (0, state.control, ffi::RSMPI_STATUS_IGNORE);
        check("MPI_Iprobe", ffi::MPI_Iprobe(from as c_int, tag, comm, &mut there, status))?;
        if there != 0 {
            let (data, count, datatype) = (into.as_mut_ptr().cast(), into.len() as c_int, ffi::RSMPI_UINT8_T);
            check("MPI_Recv", ffi::MPI_Recv(data, count, datatype, from as c_int, tag, comm, status))?;
        }
        Ok(there != 0)
    }
}
