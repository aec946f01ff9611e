//! Part of a communicator that its watchdog shares: NCCL's handle and the error that ended it.

use std::ptr;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use cudarc::driver::{CudaContext, DriverError};
use cudarc::nccl::sys::{self, ncclComm_t, ncclResult_t};
use parking_lot::Mutex;

use super::library::{failed, failure};
use crate::error::ShardError;

pub(super) struct Core {
    pub rank: usize,
    pub timeout: Duration,
    pub context: Arc<CudaContext>,
    /// Null after an abort.
    comm: Mutex<Handle>,
    /// First error of the watchdog.
    failed: Mutex<Option<ShardError>>,
}

struct Handle(ncclComm_t);

// SAFETY: any thread may use NCCL's communicators, one at a time: a lock guards them.
unsafe impl Send for Handle {}

impl Core {
    /// # Safety
    /// `comm` is null or a communicator of NCCL that nothing else uses.
    pub unsafe fn new(rank: usize, timeout: Duration, context: Arc<CudaContext>, comm: ncclComm_t) -> Self {
        Self { rank, timeout, context, comm: Mutex::new(Handle(comm)), failed: Mutex::new(None) }
    }

    /// Makes the device's context current on this thread.
    pub fn bind(&self) -> Result<(), ShardError> {
        self.context.bind_to_thread().map_err(|error| self.cuda(error))
    }

    pub fn cuda(&self, error: DriverError) -> ShardError {
        ShardError::Cuda { rank: self.rank, reason: error.to_string() }
    }

    /// Returns an error if the watchdog has recorded one.
    pub fn alive(&self) -> Result<(), ShardError> {
        self.failed.lock().as_ref().map_or(Ok(()), |cause| Err(ShardError::Dead { cause: Box::new(cause.clone()) }))
    }

    /// Records the first error that no caller could receive.
    pub fn fail(&self, error: ShardError) {
        log::error!("{error}");
        self.failed.lock().get_or_insert(error);
    }

    /// Makes a call and waits until NCCL has accepted it.
    pub fn call(&self, during: &str, launch: impl FnOnce(ncclComm_t) -> ncclResult_t) -> Result<(), ShardError> {
        self.alive()?;
        self.bind()?;
        let code = launch(self.handle(&self.comm.lock())?);
        self.settle(during, code)
    }

    fn handle(&self, comm: &Handle) -> Result<ncclComm_t, ShardError> {
        let aborted = || failed(self.rank, "a later call", "its communicator was aborted after an earlier error");
        if comm.0.is_null() { Err(aborted()) } else { Ok(comm.0) }
    }

    /// Waits until NCCL has accepted a call. Calls do not block, so NCCL may still be working on
    /// one. A call that fails or exceeds the time limit aborts the communicator.
    pub fn settle(&self, during: &str, mut code: ncclResult_t) -> Result<(), ShardError> {
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
                    return Err(failed(self.rank, during, &reason));
                }
                code => {
                    let error = failure(self.rank, during, code);
                    self.abort();
                    return Err(error);
                }
            }
            code = self.state()?;
        }
    }

    fn state(&self) -> Result<ncclResult_t, ShardError> {
        let comm = self.comm.lock();
        let mut state = ncclResult_t::ncclSuccess;
        // SAFETY: the communicator is not aborted, and `state` is a local.
        let code = unsafe { sys::ncclCommGetAsyncError(self.handle(&comm)?, &mut state) };
        Ok(if code == ncclResult_t::ncclSuccess { state } else { code })
    }

    /// Returns once `done` is true. Aborts at an error of `done` or of NCCL, and at the time limit.
    pub fn watch(&self, label: &str, mut done: impl FnMut() -> Result<bool, ShardError>) -> Result<(), ShardError> {
        let since = Instant::now();
        // Most collectives end soon, and frequent queries slow down the driver's launches.
        let mut pause = Duration::from_micros(100);
        let ended = loop {
            match done() {
                Ok(true) => return Ok(()),
                Ok(false) => {}
                Err(error) => break error,
            }
            match self.state() {
                Ok(ncclResult_t::ncclSuccess | ncclResult_t::ncclInProgress) => {}
                Ok(code) => break failure(self.rank, "an earlier collective", code),
                Err(error) => break error,
            }
            if since.elapsed() >= self.timeout {
                let waited = since.elapsed().as_secs_f64();
                let reason = format!("it has not ended after {waited:.1} s: a rank has not arrived");
                break failed(self.rank, &format!("the collective of {label:?}"), &reason);
            }
            thread::sleep(pause);
            pause = (2 * pause).min(Duration::from_millis(5));
        };
        self.abort();
        Err(ended)
    }

    pub fn abort(&self) {
        let comm = std::mem::replace(&mut self.comm.lock().0, ptr::null_mut());
        if !comm.is_null() {
            // SAFETY: the handle comes from NCCL and is no longer shared.
            unsafe { sys::ncclCommAbort(comm) };
        }
    }

    /// Waits for collectives in flight, at most for the time limit, and ends the communicator.
    pub fn end(&self) {
        let code = {
            // Held during the call: an abort on another thread invalidates the handle.
            let comm = self.comm.lock();
            if comm.0.is_null() {
                return;
            }
            // SAFETY: the handle comes from NCCL and is not aborted; `settle` aborts it at the time
            // limit.
            unsafe { sys::ncclCommFinalize(comm.0) }
        };
        if let Err(error) = self.settle("ncclCommFinalize", code) {
            log::error!("{error}");
            return;
        }
        let comm = std::mem::replace(&mut self.comm.lock().0, ptr::null_mut());
        if !comm.is_null() {
            // SAFETY: finalized and no longer shared.
            unsafe { sys::ncclCommDestroy(comm) };
        }
    }
}
