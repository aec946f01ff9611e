//! End of a world: in order when all ranks leave, else so that no rank keeps waiting.

use std::mem;
use std::thread;
use std::time::Duration;

use ::mpi::{environment, ffi};

use super::watch::Backoff;
use super::world::{State, World, check};
use crate::error::CommError;

/// Exit code of a job that a communicator ended after an error.
const FAILED: i32 = 70;
/// Rust's exit code after a panic.
const PANICKED: i32 = 101;
/// Time for the process to print its error and to return its exit code after a failed communicator
/// is dropped.
const GRACE: Duration = Duration::from_millis(500);
/// Delay when a rank with a collective's error drops its communicator. The first process to exit
/// ends the others, and all should print their errors first.
const LAST_WORDS: Duration = Duration::from_millis(300);
/// Delay of a rank that left early without such an error. It is shorter: users look for this rank's
/// reason, and a program may print it only after dropping the communicator.
const FIRST_WORDS: Duration = Duration::from_millis(100);

impl Drop for World {
    fn drop(&mut self) {
        let left = self.leave();
        let state = &mut *self.lock();
        let universe = state.universe.take();
        match left {
            // Finalizes MPI.
            Ok(()) => drop(universe),
            Err(error) => {
                let failed = state.dead.is_some();
                if !failed {
                    log::error!("{error}");
                }
                // Finalizing would wait for absent ranks, and MPI may still write to the buffers.
                mem::forget(universe);
                mem::forget(mem::take(&mut state.orphans));
                end_soon();
                thread::sleep(if failed { LAST_WORDS } else { FIRST_WORDS });
            }
        }
    }
}

impl World {
    /// Waits until all ranks leave.
    fn leave(&self) -> Result<(), CommError> {
        let backoff = Backoff::new(0);
        let mut barrier = {
            let state: &mut State = &mut self.lock();
            state.alive()?;
            self.tell_leaving(state)?;
            // SAFETY: a barrier has no buffers.
            unsafe {
                let mut barrier = ffi::RSMPI_REQUEST_NULL;
                check("MPI_Ibarrier", ffi::MPI_Ibarrier(state.control, &mut barrier))?;
                barrier
            }
        };
        let mut here = false;
        loop {
            let state = &mut *self.lock();
            here = here || state.test(&mut barrier, &"leaving")?;
            state.test_orphans()?;
            self.read_messages(state)?;
            // All messages have been read: each rank sent its own before the barrier.
            let told = (0..self.size).all(|rank| rank == self.rank || state.left[rank].is_some());
            if here && told && state.orphans.is_empty() {
                return Ok(());
            }
            // A rank that has given up does not arrive.
            let given_up = state.calls.iter().position(Option::is_some);
            if given_up.is_some() || backoff.waited() >= self.timeout {
                let (rank, world_size, waited) = (self.rank, self.size, backoff.waited());
                return Err(CommError::Leave { rank, world_size, waited, failed: given_up });
            }
            backoff.pause();
        }
    }
}

/// Ends the job unless this process exits first: mpirun ends the other ranks when one exits without
/// finalizing MPI.
fn end_soon() {
    let spawned = thread::Builder::new().name("end of job".into()).spawn(|| {
        thread::sleep(GRACE);
        abort(FAILED);
    });
    if spawned.is_err() {
        abort(FAILED);
    }
}

fn abort(code: i32) -> ! {
    // SAFETY: MPI has started and is not finalized. Another thread may be inside an MPI call, but
    // the job ends here.
    unsafe { ffi::MPI_Abort(ffi::RSMPI_COMM_WORLD, code) };
    std::process::abort()
}

/// Ends the job after a panic, unless MPI has been finalized.
pub(crate) fn end_after_panic() {
    if !environment::is_finalized() {
        abort(PANICKED);
    }
}
