//! Ranks of a communicator on host memory, before NCCL connects them.

use std::sync::Arc;

use parking_lot::Mutex;

use crate::communicator::Communicator;
use crate::error::CommError;
#[cfg(feature = "mpi")]
use crate::mpi::World;
use crate::nccl::Meeting;
use crate::traffic::Traffic;

impl Meeting for Communicator {
    fn rank(&self) -> usize {
        self.rank()
    }

    fn local_rank(&self) -> usize {
        self.local_rank()
    }

    fn world_size(&self) -> usize {
        self.world_size()
    }

    fn has_host_collectives(&self) -> bool {
        self.has_host_collectives()
    }

    fn all_ok(&self, what: &str, result: Result<(), &CommError>) -> Result<(), CommError> {
        self.all_ok(what, result)
    }

    fn bytes_of_rank_0(&self, what: &str, own: &[u8]) -> Result<Vec<u8>, CommError> {
        Ok(self.all_gather_bytes(what, own)?.swap_remove(0))
    }

    fn counter(&self) -> Arc<Mutex<Traffic>> {
        Arc::clone(self.counter())
    }

    #[cfg(feature = "mpi")]
    fn mpi_world(&self) -> Option<Arc<World>> {
        self.mpi_world()
    }
}
