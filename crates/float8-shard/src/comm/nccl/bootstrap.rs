//! Connection of the ranks' devices: rank 0's id reaches the others over MPI.

use std::ffi::c_int;
use std::mem;
use std::ptr;

use cudarc::nccl::sys::{self, ncclComm_t, ncclConfig_t};

use super::comm::NcclComm;
use super::events::Lane;
use super::library::{self, ID, failed};
use crate::comm::communicator::Communicator;
use crate::comm::launch::{timeout, variable};
use crate::error::ShardError;

impl NcclComm {
    /// Connects the devices of all ranks. `device` is the ordinal of this rank's device; the
    /// default is its local rank.
    pub(crate) fn connect(host: &Communicator, device: Option<usize>) -> Result<Self, ShardError> {
        let rank = host.rank();
        let timeout = timeout(&variable)?;
        let opened = library::find(rank).and_then(|()| {
            let context = library::open_device(rank, device.unwrap_or(host.local_rank()))?;
            let lane = Lane::new(rank, &context)?;
            Ok((context, lane))
        });
        let opened = on_all(host, "finding NCCL and a CUDA device", opened)?;
        let id = if rank == 0 { library::new_id(rank).map(|id| id.to_vec()) } else { Ok(vec![]) };
        let id = on_all(host, "making NCCL's id", id)?;
        let id: Result<[u8; ID], _> = host.all_gather_bytes("NCCL's id", &id)?.swap_remove(0).try_into();
        let id = library::id_of(id.map_err(|_| failed(0, "ncclGetUniqueId", "no id came"))?);
        let mut config = config();
        let world_size = host.world_size() as c_int;
        let mut comm: ncclComm_t = ptr::null_mut();
        // SAFETY: NCCL is loaded, and `open_device` has made the device's context current. The
        // pointers are to locals, which NCCL accesses only before it returns.
        let code = unsafe { sys::ncclCommInitRankConfig(&mut comm, world_size, id, rank as c_int, &mut config) };
        // SAFETY: `comm` is null or a communicator that nothing else uses.
        let connected = unsafe { Self::new(host, comm, opened, timeout) }?;
        connected.core.settle("ncclCommInitRankConfig", code)?;
        Ok(connected)
    }
}

/// Returns `result` if it is `Ok` on every rank. This rank's error, which has more detail, precedes
/// another's.
fn on_all<T>(host: &Communicator, what: &str, result: Result<T, ShardError>) -> Result<T, ShardError> {
    let all = host.all_ok(what, result.as_ref().map(|_| ()));
    let value = result?;
    all.map(|()| value)
}

/// NCCL's default configuration with nonblocking calls, so that they can have a time limit.
fn config() -> ncclConfig_t {
    let unset = c_int::MIN;
    ncclConfig_t {
        // A newer NCCL fills in fields that this structure lacks; an older one reads only the
        // fields it knows.
        size: mem::size_of::<ncclConfig_t>(),
        magic: 0xcafe_beef,
        // Version 2.28, which defines this structure.
        version: 22800,
        blocking: 0,
        cgaClusterSize: unset,
        minCTAs: unset,
        maxCTAs: unset,
        netName: ptr::null(),
        splitShare: unset,
        trafficClass: unset,
        commName: ptr::null(),
        collnetEnable: unset,
        CTAPolicy: unset,
        shrinkShare: unset,
        nvlsCTAs: unset,
        nChannelsPerNetPeer: unset,
        nvlinkCentricSched: unset,
        graphUsageMode: unset,
        numRmaCtx: unset,
        maxP2pPeers: unset,
    }
}
