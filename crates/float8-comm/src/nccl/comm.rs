//! Communicator of NCCL: each call has a time limit, is counted and, with MPI, compared between
//! ranks.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use cudarc::driver::CudaContext;
use cudarc::nccl::sys::{ncclComm_t, ncclResult_t};
use parking_lot::Mutex;

use super::core::Core;
use super::events::Lane;
use super::meeting::Meeting;
use super::watchdog::Watchdog;
use crate::collective::{Collective, Operation};
use crate::error::CommError;
#[cfg(feature = "mpi")]
use crate::mpi::World;
use crate::options::Options;
use crate::traffic::Traffic;

/// Collectives on the memory of CUDA devices, one device per rank.
///
/// They are enqueued on a stream, and their results are valid once the stream has passed them.
/// Later errors of NCCL are reported by [`async_error`](Self::async_error) and
/// [`watch`](Self::watch). [`after_context`](Self::after_context) provides a stream and a watchdog.
///
/// All ranks call them in the same order, from one thread at a time. Addresses are memory of this
/// rank's device, aligned to 4 bytes. A stream belongs to that device's primary context (a
/// `CUstream` or `cudaStream_t`).
pub struct NcclComm {
    pub(super) world_size: usize,
    pub(super) core: Arc<Core>,
    pub(super) lane: Arc<Lane>,
    pub(super) watchdog: Watchdog,
    /// Order of the work that is enqueued on `lane`.
    pub(super) order: Mutex<()>,
    started: AtomicU64,
    traffic: Arc<Mutex<Traffic>>,
    #[cfg(feature = "mpi")]
    world: Option<Arc<World>>,
}

/// One call, for numbering and counting.
pub(super) struct Call<'a> {
    pub operation: Operation,
    pub label: &'a str,
    /// Bytes that this rank gives.
    pub sent: usize,
    /// Bytes that other ranks send.
    pub received: u64,
    /// Bytes that the ranks compare.
    pub bytes: usize,
}

impl NcclComm {
    /// # Safety
    /// `comm` is null or a communicator of NCCL that nothing else uses.
    pub(super) unsafe fn new(
        host: &dyn Meeting,
        comm: ncclComm_t,
        (context, lane): (Arc<CudaContext>, Lane),
        options: Options,
    ) -> Result<Self, CommError> {
        // SAFETY: guaranteed by the caller.
        let core = Arc::new(unsafe { Core::new(host.rank(), options.timeout, context, comm) });
        let watchdog = Watchdog::start(Arc::clone(&core)).inspect_err(|_| core.abort())?;
        Ok(Self {
            world_size: host.world_size(),
            core,
            lane: Arc::new(lane),
            watchdog,
            order: Mutex::new(()),
            started: AtomicU64::new(0),
            traffic: host.counter(),
            #[cfg(feature = "mpi")]
            world: host.mpi_world(),
        })
    }

    /// Ordinal of this rank's device.
    pub fn device(&self) -> usize {
        self.core.context.ordinal()
    }

    pub(super) fn rank(&self) -> usize {
        self.core.rank
    }

    /// Numbers, compares, launches and counts a call.
    pub(super) fn start(&self, call: &Call, launch: impl FnOnce(ncclComm_t) -> ncclResult_t) -> Result<(), CommError> {
        let collective = self.number(call)?;
        self.core.call(&collective.to_string(), launch)?;
        self.traffic.lock().add(call.operation, call.label, call.sent as u64, call.received);
        Ok(())
    }

    fn number(&self, call: &Call) -> Result<Collective, CommError> {
        #[cfg(feature = "mpi")]
        if let Some(world) = &self.world {
            return world.announce(call.operation, call.label, call.bytes);
        }
        let number = self.started.fetch_add(1, Ordering::Relaxed) + 1;
        Ok(Collective { number, operation: call.operation, label: call.label.into(), bytes: call.bytes as u64 })
    }

    /// Waits until NCCL has accepted a call.
    pub(super) fn settle(&self, during: &str, code: ncclResult_t) -> Result<(), CommError> {
        self.core.settle(during, code)
    }

    /// Error that NCCL met after a call had returned, such as a lost rank or a failed connection.
    ///
    /// # Errors
    /// [`CommError::Nccl`].
    pub fn async_error(&self) -> Result<(), CommError> {
        self.core.async_error()
    }

    /// Watchdog for collectives on a stream other than [`after_context`](Self::after_context)'s.
    /// Returns once `done` is true, for instance a query of an event recorded after the collective
    /// `label`.
    ///
    /// # Errors
    /// The errors of `done` and of [`async_error`](Self::async_error); [`CommError::Nccl`] at the
    /// time limit. Each aborts the communicator, so that the stream does not wait forever.
    pub fn watch(&self, label: &str, done: impl FnMut() -> Result<bool, CommError>) -> Result<(), CommError> {
        self.core.watch(label, done)
    }

    /// Ends all collectives in flight, which leaves their memory undefined, and makes every later
    /// call an error.
    pub fn abort(&self) {
        self.core.abort();
    }
}

impl Drop for NcclComm {
    /// Waits for collectives in flight, at most for the time limit.
    fn drop(&mut self) {
        self.core.end();
    }
}

impl std::fmt::Debug for NcclComm {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "NcclComm(rank {} of {}, device {})", self.rank(), self.world_size, self.device())
    }
}
