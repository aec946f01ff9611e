//! Watchdog: waits for a collective and, at the time limit, names the ranks that are not in it.

use std::time::{Duration, Instant};

use ::mpi::ffi::MPI_Request;

use super::wire::{decode, encode};
use super::world::{State, World};
use crate::collective::{Absence, Collective, Whereabouts};
use crate::error::CommError;

/// Time that a rank that has given up waits for the other ranks to report.
const ROLL_CALL: Duration = Duration::from_secs(1);
/// Interval between checks for messages of other ranks.
const LOOK: Duration = Duration::from_millis(1);

/// Pause between tests of a transfer. It first only yields, as most transfers end soon and MPI
/// moves data during tests. Later it sleeps, which frees the core.
pub(crate) struct Backoff {
    since: Instant,
    spin: Duration,
}

impl Backoff {
    /// Backoff for a transfer of `bytes`.
    pub(crate) fn new(bytes: u64) -> Self {
        // Four nanoseconds per byte equal 250 MB/s.
        Self { since: Instant::now(), spin: Duration::from_micros(200) + Duration::from_nanos(bytes.saturating_mul(4)) }
    }

    pub(crate) fn waited(&self) -> Duration {
        self.since.elapsed()
    }

    pub(crate) fn pause(&self) {
        if self.waited() < self.spin {
            std::thread::yield_now()
        } else {
            std::thread::sleep(Duration::from_micros(100))
        }
    }
}

impl World {
    /// Waits for the transfer of `collective`. After an error the world is dead, and MPI may still
    /// use the buffers.
    pub(crate) fn wait(&self, request: &mut MPI_Request, collective: &Collective) -> Result<(), CommError> {
        let backoff = Backoff::new(collective.bytes.saturating_mul(self.size as u64));
        let mut looked: Option<Instant> = None;
        loop {
            {
                let state = &mut *self.lock();
                state.alive()?;
                match state.test(request, collective) {
                    Ok(true) => return Ok(()),
                    Ok(false) => {}
                    Err(error) => return Err(self.die(state, collective, error)),
                }
                if looked.is_none_or(|last| last.elapsed() >= LOOK) {
                    looked = Some(Instant::now());
                    self.look(state, collective)?;
                }
            }
            let late = backoff.waited() >= self.timeout;
            if late || self.lock().calls.iter().any(Option::is_some) {
                return self.roll_call(request, collective, (backoff.waited(), late));
            }
            backoff.pause();
        }
    }

    /// Returns an error if a rank that this collective needs has left.
    fn look(&self, state: &mut State, collective: &Collective) -> Result<(), CommError> {
        let told = self.read_messages(state).and_then(|()| state.test_orphans());
        if let Err(error) = told {
            return Err(self.die(state, collective, error));
        }
        let gone = |after: &Option<u64>| after.filter(|after| *after < collective.number);
        let Some((left, after)) = state.left.iter().enumerate().find_map(|(rank, after)| Some((rank, gone(after)?)))
        else {
            return Ok(());
        };
        let (rank, world_size, collective) = (self.rank, self.size, collective.clone());
        let error = CommError::Left { rank, world_size, collective: collective.clone(), left, after };
        Err(self.die(state, &collective, error))
    }

    /// Ends the world with `error` and notifies the other ranks.
    pub(crate) fn die(&self, state: &mut State, collective: &Collective, error: CommError) -> CommError {
        if !state.called {
            // An error here is less important than the one being reported.
            _ = self.tell_given_up(state, collective);
        }
        log::error!("{error}");
        state.dead.get_or_insert(error).clone()
    }

    /// Collects the location of the other ranks: each waiting rank reports its collective and gives
    /// up as well.
    ///
    /// A rank that joins because another has given up may still see its own transfer end. It then
    /// stops at a later error. So the compare mode's difference is the error of every rank,
    /// regardless of the rank that finds it first.
    fn roll_call(
        &self,
        request: &mut MPI_Request,
        collective: &Collective,
        (waited, late): (Duration, bool),
    ) -> Result<(), CommError> {
        let asked = Instant::now();
        loop {
            {
                let state = &mut *self.lock();
                state.alive()?;
                let done = state.test(request, collective);
                if !late && matches!(done, Ok(true)) {
                    return Ok(());
                }
                let told = if state.called { Ok(()) } else { self.tell_given_up(state, collective) };
                let told = told.and_then(|()| self.read_messages(state)).and_then(|()| state.test_orphans());
                let missing = self.missing(state, collective);
                let known = late && !missing.iter().any(|absence| absence.at == Whereabouts::Silent);
                if known || done.and(told).is_err() || asked.elapsed() >= ROLL_CALL {
                    let (rank, world_size, collective) = (self.rank, self.size, collective.clone());
                    let error =
                        CommError::Timeout { rank, world_size, collective: collective.clone(), waited, missing };
                    return Err(self.die(state, &collective, error));
                }
            }
            std::thread::sleep(LOOK);
        }
    }

    fn missing(&self, state: &State, collective: &Collective) -> Vec<Absence> {
        let own = encode(collective);
        let others = (0..self.size).filter(|rank| *rank != self.rank);
        let absent = others.filter_map(|rank| {
            let at = match (&state.calls[rank], state.left[rank]) {
                (Some(told), _) if *told == own => return None,
                (Some(told), _) => decode(told).map_or(Whereabouts::Silent, Whereabouts::In),
                (None, Some(after)) if after >= collective.number => return None,
                (None, Some(after)) => Whereabouts::Left(after),
                (None, None) => Whereabouts::Silent,
            };
            Some(Absence { rank, at })
        });
        absent.collect()
    }
}
