//! What serves collectives on host memory.

#[cfg(feature = "mpi")]
use std::sync::Arc;

#[cfg(feature = "mpi")]
use crate::mpi::World;

/// What serves collectives on host memory.
#[derive(Clone)]
pub(crate) enum Host {
    /// A world of one.
    Solo,
    #[cfg(feature = "mpi")]
    Mpi(Arc<World>),
    /// Nothing: ranks that NCCL alone connects.
    #[cfg(feature = "nccl")]
    Absent,
}

/// `alone` in a world of one, `over_mpi` with MPI's world, else an error.
macro_rules! serve {
    ($host:expr, $operation:expr, $label:expr, $alone:expr, |$world:ident| $over_mpi:expr) => {
        match $host {
            $crate::host::Host::Solo => Ok($alone),
            #[cfg(feature = "mpi")]
            $crate::host::Host::Mpi($world) => $over_mpi,
            #[cfg(feature = "nccl")]
            $crate::host::Host::Absent => {
                Err($crate::error::CommError::NeedsMpi { operation: $operation.name(), label: $label.into() })
            }
        }
    };
}
pub(crate) use serve;
