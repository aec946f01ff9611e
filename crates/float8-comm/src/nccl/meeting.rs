//! What NCCL's ranks need of those who start them.

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
    /// Whether they can tell each other anything.
    fn has_host_collectives(&self) -> bool;
    /// An error if any rank's is one. They can tell each other.
    fn all_ok(&self, what: &str, result: Result<(), &CommError>) -> Result<(), CommError>;
    /// The bytes of rank 0. They can tell each other.
    fn bytes_of_rank_0(&self, what: &str, own: &[u8]) -> Result<Vec<u8>, CommError>;
    /// Where to count.
    fn counter(&self) -> Arc<Mutex<Traffic>>;
    /// Who compares.
    #[cfg(feature = "mpi")]
    fn mpi_world(&self) -> Option<Arc<World>>;
}
