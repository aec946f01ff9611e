//! Waits for a collective and, at the time limit, names the ranks that are not in it.

use std::time::{Duration, Instant};

use ::mpi::ffi::MPI_Request;

use super::wire::{decode, encode};
use super::world::{Group, State, World};
use crate::comm::collective::{Absence, Collective, Whereabouts};
use crate::error::ShardError;

/// Time that a rank that has given up waits for the other ranks to report.
const ROLL_CALL: Duration = Duration::from_secs(1);
/// Interval between checks for messages of other ranks.
const LOOK: Duration = Duration::from_millis(1);

/// Pause between tests of a transfer. It first only yields, as most transfers end soon and MPI
/// moves data during tests. Later it sleeps, which frees the core.
pub(super) struct Backoff {
    since: Instant,
    spin: Duration,
}

impl Backoff {
    /// Backoff for a transfer of `bytes`.
    pub(super) fn new(bytes: u64) -> Self {
        // Four nanoseconds per byte equal 250 MB/s.
        Self { since: Instant::now(), spin: Duration::from_micros(200) + Duration::from_nanos(bytes.saturating_mul(4)) }
    }

    pub(super) fn waited(&self) -> Duration {
        self.since.elapsed()
    }

    pub(super) fn pause(&self) {
        if self.waited() < self.spin {
            std::thread::yield_now()
        } else {
            std::thread::sleep(Duration::from_micros(100))
        }
    }
}

impl World {
    /// Ends the world with `error` and notifies the other ranks.
    pub(super) fn die(&self, state: &mut State, collective: &Collective, error: ShardError) -> ShardError {
        if !state.called {
            // An error here is less important than the one being reported.
            _ = self.tell_given_up(state, collective);
        }
        log::error!("{error}");
        state.dead.get_or_insert(error).clone()
    }
}

impl Group {
    /// Waits for the transfer of `collective`. After an error the world is dead, and MPI may still
    /// use the buffers.
    pub(super) fn wait(&self, request: &mut MPI_Request, collective: &Collective) -> Result<(), ShardError> {
        let backoff = Backoff::new(collective.bytes.saturating_mul(self.size() as u64));
        let mut looked: Option<Instant> = None;
        loop {
            {
                let state = &mut *self.world.lock();
                state.alive()?;
                match state.test(request, collective) {
                    Ok(true) => return Ok(()),
                    Ok(false) => {}
                    Err(error) => return Err(self.world.die(state, collective, error)),
                }
                if looked.is_none_or(|last| last.elapsed() >= LOOK) {
                    looked = Some(Instant::now());
                    self.look(state, collective)?;
                }
            }
            let late = backoff.waited() >= self.world.timeout;
            if late || self.world.lock().calls.iter().any(Option::is_some) {
                return self.roll_call(request, collective, backoff.waited(), late);
            }
            backoff.pause();
        }
    }

    /// Returns an error if a rank that this collective needs has left.
    fn look(&self, state: &mut State, collective: &Collective) -> Result<(), ShardError> {
        self.world.read_messages(state);
        let tested = state.test_orphans();
        let gone = |rank: &usize| Some((*rank, state.left[*rank].filter(|after| *after < collective.number)?));
        let error = match (tested, self.members.iter().find_map(gone)) {
            (Err(error), _) => error,
            (_, None) => return Ok(()),
            (_, Some((left, after))) => {
                let World { rank, size: world_size, .. } = *self.world;
                ShardError::Left { rank, world_size, collective: collective.clone(), left, after }
            }
        };
        Err(self.world.die(state, collective, error))
    }

    /// Collects the location of the other ranks: each waiting rank reports its collective and gives
    /// up as well.
    ///
    /// A rank that joins because another has given up may still see its own transfer end. It then
    /// stops at a later error. So a difference is the error of every rank, regardless of the rank
    /// that finds it first.
    fn roll_call(
        &self,
        request: &mut MPI_Request,
        collective: &Collective,
        waited: Duration,
        late: bool,
    ) -> Result<(), ShardError> {
        let asked = Instant::now();
        loop {
            {
                let state = &mut *self.world.lock();
                state.alive()?;
                let done = state.test(request, collective);
                if !late && matches!(done, Ok(true)) {
                    return Ok(());
                }
                let told = if state.called { Ok(()) } else { self.world.tell_given_up(state, collective) };
                self.world.read_messages(state);
                let told = told.and_then(|()| state.test_orphans());
                let missing = self.missing(state, collective);
                let known = late && !missing.iter().any(|absence| absence.at == Whereabouts::Silent);
                if known || done.and(told).is_err() || asked.elapsed() >= ROLL_CALL {
                    let World { rank, size: world_size, .. } = *self.world;
                    let own = collective.clone();
                    let error = ShardError::Timeout { rank, world_size, collective: own, waited, missing };
                    return Err(self.world.die(state, collective, error));
                }
            }
            std::thread::sleep(LOOK);
        }
    }

    /// Ranks of the group that are not in `collective`, and all ranks that wait in none: one of them
    /// may be what a rank of the group waits for.
    fn missing(&self, state: &State, collective: &Collective) -> Vec<Absence> {
        let own = encode(collective);
        let others = (0..self.world.size).filter(|rank| *rank != self.world.rank);
        let absent = others.filter_map(|rank| {
            let is_member = self.members.contains(&rank);
            let at = match (&state.calls[rank], state.left[rank]) {
                (Some(told), _) if *told == own || !is_member => return None,
                (Some(told), _) => decode(told).map_or(Whereabouts::Silent, Whereabouts::In),
                (None, Some(after)) if after >= collective.number || !is_member => return None,
                (None, Some(after)) => Whereabouts::Left(after),
                (None, None) => Whereabouts::Silent,
            };
            Some(Absence { rank, at })
        });
        absent.collect()
    }
}
