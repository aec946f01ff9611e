//! Collectives in order with all other work of the device.

use std::ffi::c_void;
use std::sync::Arc;

use super::comm::NcclComm;
use super::core::Core;
use super::events::{Event, Lane};
use crate::error::CommError;

/// Collectives that were started by [`NcclComm::after_context`].
///
/// Until [`land`](Self::land), or until it is dropped, the memory that they read and write stays allocated, and nothing else uses it.
#[must_use = "work that is given to the device before `land` runs beside the collectives"]
pub struct InFlight {
    core: Arc<Core>,
    lane: Arc<Lane>,
    /// None once the context waits for it.
    event: Option<Arc<Event>>,
}

impl NcclComm {
    /// Starts what `launch` calls with a stream of the communicator's own: it begins when the device has done what its context was
    /// given before, and what the context is given afterwards runs beside it. The host waits for neither. `label` is what the error of
    /// a collective that does not end in time names.
    ///
    /// # Errors
    /// The errors of `launch`; [`CommError::Dead`] after the error of an earlier collective; CUDA's.
    ///
    /// # Safety
    /// As for the collectives that `launch` calls, with [`InFlight`]'s words for when the stream has passed them.
    pub unsafe fn after_context(
        &self,
        label: &str,
        launch: impl FnOnce(*mut c_void) -> Result<(), CommError>,
    ) -> Result<InFlight, CommError> {
        // Between two threads' collectives there is no other's event.
        let _order = self.order.lock();
        let (core, lane) = (&self.core, &self.lane);
        core.alive()?;
        core.bind()?;
        let cuda = |error| core.cuda(error);
        lane.wait_for_context().map_err(cuda)?;
        let launched = launch(lane.stream());
        if launched.is_err() {
            // Of several calls the first may be under way, with memory that the caller is about to free.
            core.abort();
        }
        let event = Arc::new(lane.record().map_err(cuda).inspect_err(|_| core.abort())?);
        let flight = InFlight { core: Arc::clone(core), lane: Arc::clone(lane), event: Some(Arc::clone(&event)) };
        launched?;
        self.watchdog.add(label, event);
        Ok(flight)
    }
}

impl InFlight {
    /// Lets all work that the device's context is given from now on wait for the collectives; the host does not.
    ///
    /// # Errors
    /// [`CommError::Dead`] after the error of an earlier collective, or of this one; CUDA's.
    pub fn land(mut self) -> Result<(), CommError> {
        self.context_waits()?;
        self.core.alive()
    }

    fn context_waits(&mut self) -> Result<(), CommError> {
        let Some(event) = self.event.take() else { return Ok(()) };
        let waits = self.core.bind().and_then(|()| {
            let waits = self.lane.context_waits(&event);
            waits.map_err(|error| self.core.cuda(error))
        });
        // What nothing waits for must not go on.
        waits.inspect_err(|_| self.core.abort())
    }
}

impl Drop for InFlight {
    fn drop(&mut self) {
        if let Err(error) = self.context_waits() {
            log::error!("{error}");
        }
    }
}

impl std::fmt::Debug for InFlight {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("InFlight")
    }
}
