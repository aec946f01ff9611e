//! Collectives of NCCL. Each call has a time limit and is counted.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use cudarc::driver::CudaContext;
use cudarc::nccl::sys::{ncclComm_t, ncclResult_t};
use parking_lot::Mutex;

use super::core::Core;
use super::events::Lane;
use super::watchdog::Watchdog;
use crate::comm::collective::{Collective, Operation};
use crate::comm::communicator::Communicator;
use crate::comm::traffic::Traffic;
use crate::error::ShardError;

/// Collectives on the memory of CUDA devices, one device per rank.
///
/// They are enqueued on a stream, and their results are valid once the stream has passed them.
/// [`after_context`](Self::after_context) provides the stream and a watchdog, which reports later
/// errors of NCCL.
///
/// All ranks call them in the same order, from one thread at a time. Addresses are memory of this
/// rank's device, aligned to 4 bytes.
pub(crate) struct NcclComm {
    pub(super) world_size: usize,
    pub(super) core: Arc<Core>,
    pub(super) lane: Arc<Lane>,
    pub(super) watchdog: Watchdog,
    /// Order of the work that is enqueued on `lane`.
    pub(super) order: Mutex<()>,
    started: AtomicU64,
    traffic: Arc<Mutex<Traffic>>,
}

impl NcclComm {
    /// # Safety
    /// `comm` is null or a communicator of NCCL that nothing else uses.
    pub(super) unsafe fn new(
        host: &Communicator,
        comm: ncclComm_t,
        (context, lane): (Arc<CudaContext>, Lane),
        timeout: Duration,
    ) -> Result<Self, ShardError> {
        // SAFETY: guaranteed by the caller.
        let core = Arc::new(unsafe { Core::new(host.rank(), timeout, context, comm) });
        let watchdog = Watchdog::start(Arc::clone(&core)).inspect_err(|_| core.abort())?;
        Ok(Self {
            world_size: host.world_size(),
            core,
            lane: Arc::new(lane),
            watchdog,
            order: Mutex::new(()),
            started: AtomicU64::new(0),
            traffic: Arc::clone(host.counter()),
        })
    }

    /// Ordinal of this rank's device.
    pub(crate) fn device(&self) -> usize {
        self.core.context.ordinal()
    }

    /// Numbers, launches and counts a call that is given `bytes`, and gets `received` from other ranks.
    pub(super) fn start(
        &self,
        operation: Operation,
        label: &str,
        bytes: u64,
        received: u64,
        launch: impl FnOnce(ncclComm_t) -> ncclResult_t,
    ) -> Result<(), ShardError> {
        let number = self.started.fetch_add(1, Ordering::Relaxed) + 1;
        let collective = Collective { number, operation, label: label.into(), bytes };
        self.core.call(&collective.to_string(), launch)?;
        self.traffic.lock().add(operation, bytes, received);
        Ok(())
    }
}

impl Drop for NcclComm {
    /// Waits for collectives in flight, at most for the time limit.
    fn drop(&mut self) {
        self.core.end();
    }
}
