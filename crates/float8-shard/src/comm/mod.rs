//! Ranks of a job and their collectives: MPI on host memory, NCCL on the memory of CUDA devices.
//!
//! Each wait has a time limit, and its error names the missing rank, the collective and its label.
//! A rank that panics, exits, is killed or returns early ends the job within seconds.

mod agree;
mod collective;
mod communicator;
mod launch;
#[cfg(feature = "mpi")]
mod mpi;
#[cfg(feature = "nccl")]
mod nccl;
mod pending;
mod traffic;

pub use collective::{Absence, Collective, Difference, Operation, Whereabouts};
pub use communicator::Communicator;
#[cfg(feature = "nccl")]
pub(crate) use nccl::{InFlight, NcclComm, Summed};
pub use pending::Pending;
pub use traffic::{Count, Traffic};
