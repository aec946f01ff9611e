//! Detection of NCCL and CUDA without panics: cudarc panics if a library is missing.

use std::ffi::{CStr, c_char};
use std::sync::Arc;

use cudarc::driver::{self, CudaContext, DriverError};
use cudarc::nccl::result::get_uniqueid;
use cudarc::nccl::sys::{self, ncclResult_t, ncclUniqueId};

use crate::error::CommError;

/// Length of an id in bytes.
pub(super) const ID: usize = 128;

/// Rank and its index on its machine.
#[derive(Clone, Copy)]
pub(super) struct Place {
    pub rank: usize,
    pub local_rank: usize,
}

/// Checks that NCCL can be loaded.
pub(super) fn find() -> Result<(), CommError> {
    // SAFETY: loads a library; its initializers are NVIDIA's.
    if unsafe { sys::is_culib_present() } { Ok(()) } else { Err(CommError::NcclMissing) }
}

/// Opens the context of a device and makes it current.
pub(super) fn open_device(place: Place, ordinal: usize) -> Result<Arc<CudaContext>, CommError> {
    let Place { rank, local_rank } = place;
    // SAFETY: as above.
    if !unsafe { driver::sys::is_culib_present() } {
        return Err(CommError::Cuda {
            rank,
            reason: "there is no libcuda.so.1, which comes with NVIDIA's driver".into(),
        });
    }
    let failed = |error: DriverError| CommError::Cuda { rank, reason: error.to_string() };
    let devices = CudaContext::device_count().map_err(failed)?.max(0) as usize;
    if ordinal >= devices {
        return Err(CommError::NoDevice { rank, local_rank, ordinal, devices });
    }
    let context = CudaContext::new(ordinal).map_err(failed)?;
    context.bind_to_thread().map_err(failed)?;
    Ok(context)
}

/// Id for a new communicator. With `NCCL_COMM_ID` set each rank derives the same id; else all ranks
/// use rank 0's. Requires that NCCL is loaded.
pub(super) fn new_id(rank: usize) -> Result<[u8; ID], CommError> {
    let id = get_uniqueid().map_err(|error| failure(rank, "ncclGetUniqueId", error.0))?;
    Ok(id.internal.map(|byte| byte as u8))
}

pub(super) fn id_of(bytes: [u8; ID]) -> ncclUniqueId {
    ncclUniqueId { internal: bytes.map(|byte| byte as c_char) }
}

/// NCCL's message for an error. Requires that NCCL is loaded.
pub(super) fn failure(rank: usize, during: &str, code: ncclResult_t) -> CommError {
    // SAFETY: NCCL's texts live as long as the library. The last error belongs to the process, so
    // no communicator is needed.
    let [what, detail] =
        unsafe { [sys::ncclGetErrorString(code), sys::ncclGetLastError(std::ptr::null_mut())] }.map(|text| {
            // SAFETY: as above; terminated by a zero unless null.
            if text.is_null() { String::new() } else { unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned() }
        });
    let detail = detail.trim();
    let reason = if detail.is_empty() { what } else { format!("{what}: {detail}") };
    CommError::Nccl { during: during.into(), rank, reason }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_library_is_an_error_that_says_what_to_install() {
        let Err(error) = find() else { return ids_are_made() };
        let text = error.to_string();
        assert!(text.contains("libnccl.so") && text.contains("LD_LIBRARY_PATH"), "{text}");
        eprintln!("no NCCL here: that ids are made was not tested");
    }

    fn ids_are_made() {
        let [one, other] = [0, 1].map(|rank| new_id(rank).unwrap());
        // With NCCL_COMM_ID all ranks have the same id.
        assert_eq!(one == other, std::env::var_os("NCCL_COMM_ID").is_some());
        assert_eq!(id_of(one).internal.map(|byte| byte as u8), one);
        let text = failure(3, "ncclCommInitRankConfig", ncclResult_t::ncclInvalidArgument).to_string();
        assert!(text.starts_with("NCCL failed in ncclCommInitRankConfig on rank 3: invalid argument"), "{text}");
    }

    #[test]
    fn a_device_that_is_not_there_is_an_error() {
        let error = open_device(Place { rank: 5, local_rank: 1 }, 4096).unwrap_err();
        let named = matches!(
            error,
            CommError::Cuda { rank: 5, .. } | CommError::NoDevice { rank: 5, local_rank: 1, ordinal: 4096, .. }
        );
        assert!(named, "{error}");
    }
}
