//! Interface of the ranks before NCCL connects them.

use std::sync::Arc;

use parking_lot::Mutex;

use crate::error::CommError;
#[cfg(feature = "mpi")]
use crate::mpi::World;
use crate::traffic::Traffic;

/// Ranks before NCCL connects them.
pub(crate) trait Meeting {
    fn rank(&self) -> usize;
    fn local_rank(&self) -> usize;
    fn world_size(&self) -> usize;
    /// Whether the ranks can communicate.
    fn has_host_collectives(&self) -> bool;
    /// Returns an error if any rank has one. Requires host collectives.
    fn all_ok(&self, what: &str, result: Result<(), &CommError>) -> Result<(), CommError>;
    /// Bytes of rank 0. Requires host collectives.
    fn bytes_of_rank_0(&self, what: &str, own: &[u8]) -> Result<Vec<u8>, CommError>;
    /// Counter of the traffic.
    fn counter(&self) -> Arc<Mutex<Traffic>>;
    /// MPI's world, which compares collectives.
    #[cfg(feature = "mpi")]
    fn mpi_world(&self) -> Option<Arc<World>>;
}
