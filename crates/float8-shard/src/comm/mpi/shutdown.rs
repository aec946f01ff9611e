//! End of a world: in order when all ranks leave, else so that no rank keeps waiting.

use std::mem;
use std::panic;
use std::sync::Once;
use std::thread;
use std::time::Duration;

use ::mpi::traits::AsRaw;
use ::mpi::{environment, ffi};

use super::watch::Backoff;
use super::world::{State, World, check};
use crate::error::ShardError;

/// Exit code of a job that a communicator ended after an error.
const FAILED: i32 = 70;
/// Rust's exit code after a panic.
const PANICKED: i32 = 101;
/// Time in which every rank prints its error, as the first process that exits ends the others. A
/// rank with a collective's error waits for it; a rank that left early, whose reason users look
/// for, does not.
const GRACE: Duration = Duration::from_millis(400);

impl Drop for World {
    fn drop(&mut self) {
        let left = self.leave();
        let state = &mut *self.lock();
        let universe = state.universe.take();
        let Err(reason) = left else {
            // Finalizes MPI.
            return drop(universe);
        };
        // Finalizing would wait for absent ranks, and MPI may still write to the buffers.
        mem::forget((universe, mem::take(&mut state.orphans)));
        end_soon();
        match state.dead {
            Some(_) => thread::sleep(GRACE),
            None => log::error!("rank {} of {} {reason}", self.rank, self.size),
        }
    }
}

impl World {
    /// Waits until all ranks leave. An error says why this rank cannot.
    fn leave(&self) -> Result<(), String> {
        let failed = |error: ShardError| format!("could not leave in order: {error}");
        let backoff = Backoff::new(0);
        let mut barrier = {
            let state: &mut State = &mut self.lock();
            state.alive().map_err(failed)?;
            self.tell_leaving(state).map_err(failed)?;
            // SAFETY: a barrier has no buffers.
            let (code, barrier) = unsafe {
                let mut barrier = ffi::RSMPI_REQUEST_NULL;
                (ffi::MPI_Ibarrier(state.control.as_raw(), &mut barrier), barrier)
            };
            check("MPI_Ibarrier", code).map_err(failed)?;
            barrier
        };
        let mut here = false;
        loop {
            let state = &mut *self.lock();
            here = here || state.test(&mut barrier, &"leaving").map_err(failed)?;
            state.test_orphans().map_err(failed)?;
            self.read_messages(state);
            // All messages have been read: each rank sent its own before the barrier.
            let told = (0..self.size).all(|rank| rank == self.rank || state.left[rank].is_some());
            if here && told && state.orphans.is_empty() {
                return Ok(());
            }
            // A rank that has given up does not arrive.
            let waited = backoff.waited();
            let dropped = || format!("dropped its communicator {:.1} s ago, and", waited.as_secs_f64());
            if let Some(rank) = state.calls.iter().position(Option::is_some) {
                return Err(format!("{} rank {rank} needs more of it, so the job ends", dropped()));
            }
            if waited >= self.timeout {
                return Err(format!("{} another rank still has its own", dropped()));
            }
            backoff.pause();
        }
    }
}

/// Ends the job unless this process exits first: mpirun ends the other ranks when one exits without
/// finalizing MPI.
fn end_soon() {
    let spawned = thread::Builder::new().name("end of job".into()).spawn(|| {
        thread::sleep(2 * GRACE);
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

/// Installs a hook that prints a panic of any thread with the rank, then ends the job, so that no
/// rank waits for one that has unwound.
pub(super) fn end_on_panic(rank: usize, world_size: usize) {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let print = panic::take_hook();
        panic::set_hook(Box::new(move |info| {
            eprintln!("rank {rank} of {world_size} panicked, which ends the job:");
            print(info);
            if !environment::is_finalized() {
                abort(PANICKED);
            }
        }));
    });
}
