//! NCCL and CUDA as this machine has them, asked without a panic: cudarc panics where a library is missing.

use std::ffi::{CStr, c_char};
use std::sync::Arc;

use cudarc::driver::{self, CudaContext, DriverError};
use cudarc::nccl::result::get_uniqueid;
use cudarc::nccl::sys::{self, ncclResult_t, ncclUniqueId};

use crate::error::CommError;

/// Bytes of an id.
pub(super) const ID: usize = 128;

/// A rank and its number on its machine.
#[derive(Clone, Copy)]
pub(super) struct Place {
    pub rank: usize,
    pub local_rank: usize,
}

/// NCCL is there.
pub(super) fn find() -> Result<(), CommError> {
    // SAFETY: loads a library, whose initializers are NVIDIA's.
    if unsafe { sys::is_culib_present() } { Ok(()) } else { Err(CommError::NcclMissing) }
}

/// The context of a device that is there.
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

/// An id for a new communicator. Where the environment has `NCCL_COMM_ID` each rank makes the same, else rank 0's is for all. NCCL is
/// there.
pub(super) fn new_id(rank: usize) -> Result<[u8; ID], CommError> {
    let id = get_uniqueid().map_err(|error| failure(rank, "ncclGetUniqueId", error.0))?;
    Ok(id.internal.map(|byte| byte as u8))
}

pub(super) fn id_of(bytes: [u8; ID]) -> ncclUniqueId {
    ncclUniqueId { internal: bytes.map(|byte| byte as c_char) }
}

/// What NCCL says of an error. NCCL is there.
pub(super) fn failure(rank: usize, during: &str, code: ncclResult_t) -> CommError {
    // SAFETY: NCCL gives texts that live as long as it does; the last error is the process's, so no communicator is needed.
    let [what, detail] =
        unsafe { [sys::ncclGetErrorString(code), sys::ncclGetLastError(std::ptr::null_mut())] }.map(|text| {
            // SAFETY: as above, ended by a zero, if it is not null.
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
        // NCCL_COMM_ID makes all ranks' ids one.
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
