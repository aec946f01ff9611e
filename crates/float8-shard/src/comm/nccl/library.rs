//! Detection of NCCL and CUDA without panics: cudarc panics if a library is missing.

use std::ffi::{CStr, c_char};
use std::sync::Arc;

use cudarc::driver::{self, CudaContext, DriverError};
use cudarc::nccl::result::get_uniqueid;
use cudarc::nccl::sys::{self, ncclResult_t, ncclUniqueId};

use crate::error::ShardError;

/// Length of an id in bytes.
pub(super) const ID: usize = 128;

/// Checks that NCCL can be loaded.
pub(super) fn find(rank: usize) -> Result<(), ShardError> {
    const MISSING: &str = "NCCL is not installed: no libnccl.so in the loader's path; install Debian's or NVIDIA's libnccl-dev, or, as \
        PyPI's nvidia-nccl wheels have libnccl.so.2 alone, make a link libnccl.so to it and put its folder into LD_LIBRARY_PATH";
    // SAFETY: loads a library; its initializers are NVIDIA's.
    if unsafe { sys::is_culib_present() } { Ok(()) } else { Err(failed(rank, "loading its library", MISSING)) }
}

/// Opens the context of a device and makes it current.
pub(super) fn open_device(rank: usize, ordinal: usize) -> Result<Arc<CudaContext>, ShardError> {
    let failed = |reason: String| ShardError::Cuda { rank, reason };
    let of_driver = |error: DriverError| failed(error.to_string());
    // SAFETY: as above.
    if !unsafe { driver::sys::is_culib_present() } {
        return Err(failed("there is no libcuda.so.1, which comes with NVIDIA's driver".into()));
    }
    let devices = CudaContext::device_count().map_err(of_driver)?.max(0) as usize;
    if ordinal >= devices {
        return Err(failed(format!(
            "device {ordinal} was asked for, of {devices}: start at most as many ranks on a machine as it has devices"
        )));
    }
    let context = CudaContext::new(ordinal).map_err(of_driver)?;
    context.bind_to_thread().map_err(of_driver)?;
    Ok(context)
}

/// Id for a new communicator. Requires that NCCL is loaded.
pub(super) fn new_id(rank: usize) -> Result<[u8; ID], ShardError> {
    let id = get_uniqueid().map_err(|error| failure(rank, "ncclGetUniqueId", error.0))?;
    Ok(id.internal.map(|byte| byte as u8))
}

pub(super) fn id_of(bytes: [u8; ID]) -> ncclUniqueId {
    ncclUniqueId { internal: bytes.map(|byte| byte as c_char) }
}

/// NCCL's message for an error. Requires that NCCL is loaded.
pub(super) fn failure(rank: usize, during: &str, code: ncclResult_t) -> ShardError {
    // SAFETY: NCCL's texts live as long as the library. The last error belongs to the process, so
    // no communicator is needed.
    let [what, detail] =
        unsafe { [sys::ncclGetErrorString(code), sys::ncclGetLastError(std::ptr::null_mut())] }.map(|text| {
            // SAFETY: as above; terminated by a zero unless null.
            if text.is_null() { String::new() } else { unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned() }
        });
    let detail = detail.trim();
    let reason = if detail.is_empty() { what } else { format!("{what}: {detail}") };
    failed(rank, during, &reason)
}

pub(super) fn failed(rank: usize, during: &str, reason: &str) -> ShardError {
    ShardError::Nccl { during: during.into(), rank, reason: reason.into() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_library_is_an_error_that_says_what_to_install() {
        let Err(error) = find(0) else { return ids_are_made() };
        let text = error.to_string();
        assert!(text.contains("libnccl.so") && text.contains("LD_LIBRARY_PATH"), "{text}");
        eprintln!("no NCCL here: that ids are made was not tested");
    }

    fn ids_are_made() {
        let [one, other] = [0, 1].map(|rank| new_id(rank).unwrap());
        assert_ne!(one, other);
        assert_eq!(id_of(one).internal.map(|byte| byte as u8), one);
        let text = failure(3, "ncclCommInitRankConfig", ncclResult_t::ncclInvalidArgument).to_string();
        assert!(text.starts_with("NCCL failed in ncclCommInitRankConfig on rank 3: invalid argument"), "{text}");
    }

    #[test]
    fn a_device_that_is_not_there_is_an_error() {
        let error = open_device(5, 4096).unwrap_err();
        assert!(matches!(error, ShardError::Cuda { rank: 5, .. }), "{error}");
    }
}
