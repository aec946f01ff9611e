#![doc = include_str!("../README.md")]

mod agree;
mod collective;
mod communicator;
mod error;
mod host;
mod host_collectives;
mod launch;
#[cfg(feature = "nccl")]
mod meeting;
#[cfg(feature = "mpi")]
mod mpi;
#[cfg(feature = "nccl")]
mod nccl;
mod options;
#[cfg(any(feature = "mpi", feature = "nccl"))]
mod panics;
mod pending;
mod traffic;

pub use collective::{Absence, Collective, Difference, Operation, Whereabouts};
pub use communicator::{Communicator, Engine};
pub use error::CommError;
#[cfg(feature = "nccl")]
pub use nccl::{InFlight, NcclComm};
pub use options::Options;
pub use pending::Pending;
pub use traffic::{Count, Traffic};
