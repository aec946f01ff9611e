//! A communicator of NCCL: each call has a time limit, is counted, and is compared with other ranks' where MPI is there to do it.

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

/// Collectives on the memory of CUDA devices, one of each rank. They are put into a stream: what they give is there when the stream
/// has come so far, and NCCL's later errors show in [`async_error`](Self::async_error) and [`watch`](Self::watch).
/// [`after_context`](Self::after_context) has such a stream, and a watchdog.
///
/// All ranks call them in the same order, from one thread at a time. Addresses are device memory of this rank's device, aligned to 4
/// bytes; a stream is one of that device's primary context (a `CUstream`, or `cudaStream_t`).
pub struct NcclComm {
    pub(super) world_size: usize,
    pub(super) core: Arc<Core>,
    pub(super) lane: Arc<Lane>,
    pub(super) watchdog: Watchdog,
    /// The order of what is started with `lane`.
    pub(super) order: Mutex<()>,
    started: AtomicU64,
    traffic: Arc<Mutex<Traffic>>,
    #[cfg(feature = "mpi")]
    world: Option<Arc<World>>,
}

/// One call, as it is numbered and counted.
pub(super) struct Call<'a> {
    pub operation: Operation,
    pub label: &'a str,
    /// Bytes that this rank gives.
    pub sent: usize,
    /// Bytes that come from others.
    pub received: u64,
    /// What ranks compare.
    pub bytes: usize,
}

impl NcclComm {
    /// # Safety
    /// `comm` is null or of NCCL, and nothing else uses it.
    pub(super) unsafe fn new(
        host: &dyn Meeting,
        comm: ncclComm_t,
        (context, lane): (Arc<CudaContext>, Lane),
        options: Options,
    ) -> Result<Self, CommError> {
        // SAFETY: the caller's promise.
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

    /// The ordinal of this rank's device.
    pub fn device(&self) -> usize {
        self.core.context.ordinal()
    }

    pub(super) fn rank(&self) -> usize {
        self.core.rank
    }

    /// Numbers, compares, makes and counts a call.
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

    /// Waits until NCCL has taken a call.
    pub(super) fn settle(&self, during: &str, code: ncclResult_t) -> Result<(), CommError> {
        self.core.settle(during, code)
    }

    /// The error that NCCL met after a call had returned: a rank that is gone, a failed connection.
    ///
    /// # Errors
    /// [`CommError::Nccl`].
    pub fn async_error(&self) -> Result<(), CommError> {
        self.core.async_error()
    }

    /// A watchdog for collectives on another stream than [`after_context`](Self::after_context)'s: returns when `done` says so, such as
    /// a query of an event that was recorded after the collective `label`.
    ///
    /// # Errors
    /// The errors of `done` and of [`async_error`](Self::async_error); [`CommError::Nccl`] if neither comes within the time limit. All abort
    /// the communicator, so that the stream does not wait for ever.
    pub fn watch(&self, label: &str, done: impl FnMut() -> Result<bool, CommError>) -> Result<(), CommError> {
        self.core.watch(label, done)
    }

    /// Ends all collectives that are in flight, whose memory is undefined then, and makes each later call an error.
    pub fn abort(&self) {
        self.core.abort();
    }
}

impl Drop for NcclComm {
    /// Waits for what is in flight, no longer than the time limit.
    fn drop(&mut self) {
        self.core.end();
    }
}

impl std::fmt::Debug for NcclComm {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "NcclComm(rank {} of {}, device {})", self.rank(), self.world_size, self.device())
    }
}
