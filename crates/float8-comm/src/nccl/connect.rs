//! Connection of the ranks, over MPI or at the address in `NCCL_COMM_ID`.

use std::ffi::c_int;
use std::mem;
use std::ptr;

use cudarc::nccl::sys::{self, ncclComm_t, ncclConfig_t};

use super::comm::NcclComm;
use super::events::Lane;
use super::library::{self, ID, Place};
use super::meeting::Meeting;
use crate::error::CommError;
use crate::launch::Lookup;
use crate::options::Options;

const COMM_ID: &str = "NCCL_COMM_ID";

impl NcclComm {
    /// Connects the devices of all ranks. `device` is the ordinal of this rank's device; the
    /// default is its local rank.
    pub(crate) fn connect(
        host: &dyn Meeting,
        device: Option<usize>,
        options: Options,
        lookup: Lookup,
    ) -> Result<Self, CommError> {
        let place = Place { rank: host.rank(), local_rank: host.local_rank() };
        let opened = library::find().and_then(|()| {
            let context = library::open_device(place, device.unwrap_or(place.local_rank))?;
            let lane = Lane::new(place.rank, &context)?;
            Ok((context, lane))
        });
        let opened = on_all(host, "finding NCCL and a CUDA device", opened)?;
        let id = meet(host, lookup)?;
        let mut config = config();
        let (world_size, rank) = (host.world_size() as c_int, place.rank as c_int);
        let mut comm: ncclComm_t = ptr::null_mut();
        // SAFETY: NCCL is loaded, and `open_device` has made the device's context current. The
        // pointers are to locals, which NCCL accesses only before it returns.
        let code = unsafe { sys::ncclCommInitRankConfig(&mut comm, world_size, library::id_of(id), rank, &mut config) };
        // SAFETY: `comm` is null or a communicator that nothing else uses.
        let connected = unsafe { Self::new(host, comm, opened, options) }?;
        connected.settle("ncclCommInitRankConfig", code)?;
        Ok(connected)
    }
}

/// Id of the communicator, the same on all ranks.
fn meet(host: &dyn Meeting, lookup: Lookup) -> Result<[u8; ID], CommError> {
    let rank = host.rank();
    if !host.has_host_collectives() {
        if lookup(COMM_ID).is_none_or(|address| address.is_empty()) {
            let address = lookup("MASTER_ADDR").unwrap_or_else(|| "10.0.0.1".into());
            return Err(CommError::NeedsCommId { example: format!("{address}:29501") });
        }
        return library::new_id(rank);
    }
    let own = if rank == 0 { library::new_id(rank).map(Some) } else { Ok(None) };
    let own = on_all(host, "making NCCL's id", own)?;
    let id = host.bytes_of_rank_0("NCCL's id", own.as_ref().map_or(&[], |id| &id[..]))?;
    let malformed = |_| CommError::Nccl { during: "ncclGetUniqueId".into(), rank: 0, reason: "no id came".into() };
    id.try_into().map_err(malformed)
}

/// Returns `result` if it is `Ok` on every rank, as far as ranks can communicate. This rank's error
/// precedes another's.
fn on_all<T>(host: &dyn Meeting, what: &str, result: Result<T, CommError>) -> Result<T, CommError> {
    if !host.has_host_collectives() {
        return result;
    }
    let all = host.all_ok(what, result.as_ref().map(|_| ()));
    // This rank's error has more detail.
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

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use parking_lot::Mutex;

    use super::*;
    #[cfg(feature = "mpi")]
    use crate::mpi::World;
    use crate::traffic::Traffic;

    /// Rank 1 of 2. Rank 0 has an error or sends its bytes; with neither, the ranks cannot
    /// communicate.
    struct Second {
        failed: Option<&'static str>,
        tells: Option<Vec<u8>>,
    }

    impl Meeting for Second {
        fn rank(&self) -> usize {
            1
        }

        fn local_rank(&self) -> usize {
            1
        }

        fn world_size(&self) -> usize {
            2
        }

        fn has_host_collectives(&self) -> bool {
            self.failed.is_some() || self.tells.is_some()
        }

        fn all_ok(&self, what: &str, _: Result<(), &CommError>) -> Result<(), CommError> {
            let error = |message: &str| CommError::RankFailed { what: what.into(), rank: 0, message: message.into() };
            self.failed.map_or(Ok(()), |message| Err(error(message)))
        }

        fn bytes_of_rank_0(&self, _: &str, own: &[u8]) -> Result<Vec<u8>, CommError> {
            assert!(own.is_empty(), "the id is rank 0's");
            Ok(self.tells.clone().expect("rank 0 has no error"))
        }

        fn counter(&self) -> Arc<Mutex<Traffic>> {
            Arc::default()
        }

        #[cfg(feature = "mpi")]
        fn mpi_world(&self) -> Option<Arc<World>> {
            None
        }
    }

    #[test]
    fn the_id_is_rank_0s() {
        let nothing: Lookup = &|_| None;
        let id: [u8; ID] = std::array::from_fn(|i| i as u8);
        assert_eq!(meet(&Second { failed: None, tells: Some(id.to_vec()) }, nothing).unwrap(), id);
        let error = meet(&Second { failed: None, tells: Some(vec![1; 5]) }, nothing).unwrap_err();
        assert!(error.to_string().contains("no id came"), "{error}");
        let error = meet(&Second { failed: Some("no NCCL"), tells: None }, nothing).unwrap_err();
        assert_eq!(error.to_string(), "making NCCL's id failed on rank 0: no NCCL");
    }

    #[test]
    fn without_mpi_ranks_need_an_address() {
        let torchrun: Lookup = &|name| (name == "MASTER_ADDR").then(|| "node7".into());
        let error = meet(&Second { failed: None, tells: None }, torchrun).unwrap_err();
        assert!(error.to_string().ends_with("NCCL_COMM_ID=node7:29501"), "{error}");
    }

    #[test]
    fn the_own_error_comes_before_the_others() {
        let host = Second { failed: Some("no device"), tells: None };
        let own = on_all::<()>(&host, "looking", Err(CommError::NcclMissing)).unwrap_err();
        assert!(matches!(own, CommError::NcclMissing), "{own}");
        let other = on_all(&host, "looking", Ok(3)).unwrap_err();
        assert_eq!(other.to_string(), "looking failed on rank 0: no device");
    }
}
