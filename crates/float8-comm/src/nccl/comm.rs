//! A communicator of NCCL: each call has a time limit, is counted, and is compared with other ranks' where MPI is there to do it.

use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use cudarc::driver::CudaContext;
use cudarc::nccl::sys::{self, ncclComm_t, ncclResult_t};
use parking_lot::Mutex;

use super::library::failure;
use super::meeting::Meeting;
use crate::collective::{Collective, Operation};
use crate::error::CommError;
#[cfg(feature = "mpi")]
use crate::mpi::World;
use crate::options::Options;
use crate::traffic::Traffic;

/// Collectives on the memory of CUDA devices, one of each rank. They are put into a stream: what they give is there when the stream
/// has come so far, and NCCL's later errors show in [`async_error`](Self::async_error) and [`watch`](Self::watch).
///
/// All ranks call them in the same order, from one thread at a time. Addresses are device memory of this rank's device, aligned to 4
/// bytes; a stream is one of that device's primary context (a `CUstream`, or `cudaStream_t`).
pub struct NcclComm {
    pub(super) rank: usize,
    pub(super) world_size: usize,
    timeout: Duration,
    context: Arc<CudaContext>,
    /// Null after an abort.
    comm: Mutex<Handle>,
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

struct Handle(ncclComm_t);

// SAFETY: NCCL's communicators may be used from any thread, one at a time: they are behind a lock.
unsafe impl Send for Handle {}

impl NcclComm {
    /// # Safety
    /// `comm` is null or of NCCL, and nothing else uses it.
    pub(super) unsafe fn new(
        host: &dyn Meeting,
        comm: ncclComm_t,
        context: Arc<CudaContext>,
        options: Options,
    ) -> Self {
        Self {
            rank: host.rank(),
            world_size: host.world_size(),
            timeout: options.timeout,
            context,
            comm: Mutex::new(Handle(comm)),
            started: AtomicU64::new(0),
            traffic: host.counter(),
            #[cfg(feature = "mpi")]
            world: host.mpi_world(),
        }
    }

    /// The ordinal of this rank's device.
    pub fn device(&self) -> usize {
        self.context.ordinal()
    }

    /// Numbers, compares, makes and counts a call.
    pub(super) fn start(&self, call: &Call, launch: impl FnOnce(ncclComm_t) -> ncclResult_t) -> Result<(), CommError> {
        let collective = self.number(call)?;
        self.context
            .bind_to_thread()
            .map_err(|error| CommError::Cuda { rank: self.rank, reason: error.to_string() })?;
        let code = launch(self.handle(&self.comm.lock())?);
        self.settle(&collective.to_string(), code)?;
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

    fn handle(&self, comm: &Handle) -> Result<ncclComm_t, CommError> {
        if comm.0.is_null() {
            let reason = "its communicator was aborted after an earlier error".into();
            return Err(CommError::Nccl { during: "a later call".into(), rank: self.rank, reason });
        }
        Ok(comm.0)
    }

    /// Waits until NCCL has taken a call. It does not block in one, so it may still be busy with it; a call that fails or is not taken
    /// in time aborts the communicator.
    pub(super) fn settle(&self, during: &str, mut code: ncclResult_t) -> Result<(), CommError> {
        let since = Instant::now();
        loop {
            match code {
                ncclResult_t::ncclSuccess => return Ok(()),
                ncclResult_t::ncclInProgress if since.elapsed() < self.timeout => {
                    thread::sleep(Duration::from_micros(20))
                }
                ncclResult_t::ncclInProgress => {
                    self.abort();
                    let reason = format!("not every rank has come within {:.1} s", since.elapsed().as_secs_f64());
                    return Err(CommError::Nccl { during: during.into(), rank: self.rank, reason });
                }
                failed => {
                    let error = failure(self.rank, during, failed);
                    self.abort();
                    return Err(error);
                }
            }
            code = self.state()?;
        }
    }

    fn state(&self) -> Result<ncclResult_t, CommError> {
        let comm = self.comm.lock();
        let mut state = ncclResult_t::ncclSuccess;
        // SAFETY: the communicator is not aborted, and `state` is a local.
        let code = unsafe { sys::ncclCommGetAsyncError(self.handle(&comm)?, &mut state) };
        Ok(if code == ncclResult_t::ncclSuccess { state } else { code })
    }

    /// The error that NCCL met after a call had returned: a rank that is gone, a failed connection.
    ///
    /// # Errors
    /// [`CommError::Nccl`].
    pub fn async_error(&self) -> Result<(), CommError> {
        match self.state()? {
            ncclResult_t::ncclSuccess | ncclResult_t::ncclInProgress => Ok(()),
            code => Err(failure(self.rank, "an earlier collective", code)),
        }
    }

    /// The watchdog: returns when `done` says so, such as a query of an event that was recorded after the collective `label`.
    ///
    /// # Errors
    /// Those of `done` and of [`async_error`](Self::async_error); [`CommError::Nccl`] if neither comes within the time limit. All abort
    /// the communicator, so that the stream does not wait for ever.
    pub fn watch(&self, label: &str, mut done: impl FnMut() -> Result<bool, CommError>) -> Result<(), CommError> {
        let since = Instant::now();
        let ended = loop {
            match done() {
                Ok(true) => return Ok(()),
                Ok(false) => {}
                Err(error) => break error,
            }
            if let Err(error) = self.async_error() {
                break error;
            }
            if since.elapsed() >= self.timeout {
                let reason = format!("it has waited {:.1} s: a rank has not arrived", since.elapsed().as_secs_f64());
                break CommError::Nccl { during: format!("the collective of {label:?}"), rank: self.rank, reason };
            }
            thread::sleep(Duration::from_micros(100));
        };
        self.abort();
        Err(ended)
    }

    /// Ends all collectives that are in flight, whose memory is undefined then, and makes each later call an error.
    pub fn abort(&self) {
        let comm = std::mem::replace(&mut self.comm.lock().0, ptr::null_mut());
        if !comm.is_null() {
            // SAFETY: the handle is of NCCL, and nothing has it any more.
            unsafe { sys::ncclCommAbort(comm) };
        }
    }
}

impl Drop for NcclComm {
    /// Waits for what is in flight, no longer than the time limit.
    fn drop(&mut self) {
        let comm = self.comm.lock().0;
        if comm.is_null() {
            return;
        }
        // SAFETY: the handle is of NCCL; `settle` aborts it if it does not end in time.
        let code = unsafe { sys::ncclCommFinalize(comm) };
        if let Err(error) = self.settle("ncclCommFinalize", code) {
            log::error!("{error}");
            return;
        }
        let comm = std::mem::replace(&mut self.comm.lock().0, ptr::null_mut());
        // SAFETY: finalized, and nothing else has it.
        unsafe { sys::ncclCommDestroy(comm) };
    }
}

impl std::fmt::Debug for NcclComm {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "NcclComm(rank {} of {}, device {})", self.rank, self.world_size, self.device())
    }
}
