//! Events that order a device's streams without the host: events of CUDA streams and of a whole
//! context.

use std::ffi::c_void;
use std::sync::Arc;

use cudarc::driver::sys::{self, CUcontext, CUevent, CUresult, CUstream};
use cudarc::driver::{CudaContext, DriverError, result};

use crate::error::ShardError;

type OfContext = unsafe extern "C" fn(CUcontext, CUevent) -> CUresult;

/// Stream of a device's primary context, and the functions that order it with all other streams
/// there.
///
/// Other users of the device do not expose their streams, and context events do not need them. One
/// event covers all work enqueued so far in the context, and all later work can wait for an event.
/// Context events need CUDA 12.5.
pub(super) struct Lane {
    context: Arc<CudaContext>,
    stream: CUstream,
    record: OfContext,
    wait: OfContext,
}

// SAFETY: any thread may use CUDA's streams and contexts.
unsafe impl Send for Lane {}
// SAFETY: as above.
unsafe impl Sync for Lane {}

impl Lane {
    /// `context` belongs to the loaded driver and is current.
    pub fn new(rank: usize, context: &Arc<CudaContext>) -> Result<Self, ShardError> {
        let [record, wait] = [c"cuCtxRecordEvent", c"cuCtxWaitEvent"].map(|name| {
            // SAFETY: both have had this signature since they were added. The library is never
            // unloaded, so the function outlives its symbol.
            let found = unsafe { sys::culib().get::<OfContext>(name.to_bytes_with_nul()) };
            let missing =
                "the NVIDIA driver lacks cuCtxRecordEvent and cuCtxWaitEvent: install one of CUDA 12.5 or newer";
            found.map(|symbol| *symbol).map_err(|_| ShardError::Cuda { rank, reason: missing.into() })
        });
        let stream = result::stream::create(result::stream::StreamKind::NonBlocking)
            .map_err(|error| ShardError::Cuda { rank, reason: error.to_string() })?;
        Ok(Self { context: Arc::clone(context), stream, record: record?, wait: wait? })
    }

    /// Stream for NCCL.
    pub fn stream(&self) -> *mut c_void {
        self.stream.cast()
    }

    /// Makes the stream wait for all work enqueued so far in the context. The context is current.
    pub fn wait_for_context(&self) -> Result<(), DriverError> {
        let event = Event::new()?;
        // SAFETY: the event belongs to this context. CUDA frees a destroyed event when nothing
        // waits for it.
        unsafe {
            (self.record)(self.context.cu_ctx(), event.0).result()?;
            result::stream::wait_event(self.stream, event.0, sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT)
        }
    }

    /// Records the work enqueued so far on the stream. The context is current.
    pub fn record(&self) -> Result<Event, DriverError> {
        let event = Event::new()?;
        // SAFETY: event and stream belong to this context.
        unsafe { result::event::record(event.0, self.stream) }?;
        Ok(event)
    }

    /// Makes all later work of the context wait for `event`. The context is current.
    pub fn context_waits(&self, event: &Event) -> Result<(), DriverError> {
        // SAFETY: the event belongs to this context.
        unsafe { (self.wait)(self.context.cu_ctx(), event.0) }.result()
    }
}

impl Drop for Lane {
    fn drop(&mut self) {
        // SAFETY: the stream is not shared; CUDA destroys it when its work is done.
        let destroyed = self.context.bind_to_thread().and_then(|()| unsafe { result::stream::destroy(self.stream) });
        if let Err(error) = destroyed {
            log::debug!("NCCL's stream: {error}");
        }
    }
}

/// Point in a stream.
pub(super) struct Event(CUevent);

// SAFETY: any thread may use CUDA's events.
unsafe impl Send for Event {}
// SAFETY: as above.
unsafe impl Sync for Event {}

impl Event {
    fn new() -> Result<Self, DriverError> {
        result::event::create(sys::CUevent_flags::CU_EVENT_DISABLE_TIMING).map(Self)
    }

    /// Whether the device has passed it.
    pub fn is_done(&self) -> Result<bool, DriverError> {
        // SAFETY: the event is alive.
        match unsafe { result::event::query(self.0) } {
            Ok(()) => Ok(true),
            Err(DriverError(CUresult::CUDA_ERROR_NOT_READY)) => Ok(false),
            Err(error) => Err(error),
        }
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: the event is not shared; CUDA frees it when nothing waits for it.
        if let Err(error) = unsafe { result::event::destroy(self.0) } {
            log::debug!("an event: {error}");
        }
    }
}
