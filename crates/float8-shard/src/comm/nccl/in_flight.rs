//! Collectives ordered with all other work of the device.

use std::ffi::c_void;
use std::sync::Arc;

use super::comm::NcclComm;
use super::core::Core;
use super::events::{Event, Lane};
use crate::error::ShardError;

/// Collectives started by [`NcclComm::after_context`].
///
/// Until [`land`](Self::land) or drop, the memory that they read and write stays allocated, and
/// nothing else uses it.
#[must_use = "work that is given to the device before `land` runs beside the collectives"]
pub(crate) struct InFlight {
    core: Arc<Core>,
    lane: Arc<Lane>,
    /// None once the context waits for the event.
    event: Option<Arc<Event>>,
}

impl NcclComm {
    /// Enqueues the calls of `launch` on the communicator's own stream, after all earlier work of
    /// the device's context. Later work of the context runs concurrently. The host does not wait.
    /// `label` names a collective in its timeout error.
    ///
    /// # Errors
    /// The errors of `launch`; [`ShardError::Dead`] after the error of an earlier collective; CUDA's
    /// errors.
    ///
    /// # Safety
    /// As for the collectives that `launch` calls, where [`InFlight`] defines when the stream has
    /// passed them.
    pub(crate) unsafe fn after_context(
        &self,
        label: &str,
        launch: impl FnOnce(*mut c_void) -> Result<(), ShardError>,
    ) -> Result<InFlight, ShardError> {
        // Keeps another thread's event out from between the collectives of this one.
        let _order = self.order.lock();
        let (core, lane) = (&self.core, &self.lane);
        core.alive()?;
        core.bind()?;
        let cuda = |error| core.cuda(error);
        lane.wait_for_context().map_err(cuda)?;
        let launched = launch(lane.stream());
        if launched.is_err() {
            // The first of several calls may be running on memory that the caller is about to free.
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
    /// Makes all later work of the device's context wait for the collectives. The host does not
    /// wait.
    ///
    /// # Errors
    /// [`ShardError::Dead`] after the error of this or an earlier collective; CUDA's errors.
    pub(crate) fn land(mut self) -> Result<(), ShardError> {
        self.context_waits()?;
        self.core.alive()
    }

    fn context_waits(&mut self) -> Result<(), ShardError> {
        let Some(event) = self.event.take() else { return Ok(()) };
        let waits = self.core.bind().and_then(|()| {
            let waits = self.lane.context_waits(&event);
            waits.map_err(|error| self.core.cuda(error))
        });
        // Collectives that nothing waits for must not continue.
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
