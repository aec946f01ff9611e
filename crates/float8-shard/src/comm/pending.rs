//! Started collective; `wait` returns its result.

use std::fmt;

use crate::error::ShardError;

/// Started collective. The program may do other work before it waits.
///
/// Ranks may wait for their pendings in any order: MPI makes progress on all of them. A pending
/// dropped without [`wait`](Self::wait) completes in the background during later collectives; other
/// ranks see no difference.
#[must_use = "a collective's errors, and its result, come from `wait`"]
pub struct Pending<T>(PendingState<T>);

enum PendingState<T> {
    Ready(T),
    #[cfg(feature = "mpi")]
    Flight(Box<dyn Flight<T>>),
}

/// Transfer of an engine.
#[cfg(feature = "mpi")]
pub(crate) trait Flight<T>: Send {
    /// Waits for the transfer.
    fn land(self: Box<Self>) -> Result<T, ShardError>;
}

impl<T> Pending<T> {
    pub(crate) fn ready(value: T) -> Self {
        Self(PendingState::Ready(value))
    }

    #[cfg(feature = "mpi")]
    pub(crate) fn flight(flight: impl Flight<T> + 'static) -> Self {
        Self(PendingState::Flight(Box::new(flight)))
    }

    /// Waits for the result.
    ///
    /// # Errors
    /// [`ShardError::Timeout`], [`ShardError::Left`], [`ShardError::Mpi`], and [`ShardError::Dead`]
    /// after one of them.
    pub fn wait(self) -> Result<T, ShardError> {
        match self.0 {
            PendingState::Ready(value) => Ok(value),
            #[cfg(feature = "mpi")]
            PendingState::Flight(flight) => flight.land(),
        }
    }
}

impl<T> fmt::Debug for Pending<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.0 {
            PendingState::Ready(_) => "Pending(ready)",
            #[cfg(feature = "mpi")]
            PendingState::Flight(_) => "Pending(in flight)",
        })
    }
}
