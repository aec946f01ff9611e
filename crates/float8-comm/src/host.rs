//! Engine of the collectives on host memory.

#[cfg(feature = "mpi")]
use std::sync::Arc;

#[cfg(feature = "mpi")]
use crate::mpi::World;

/// Engine of the collectives on host memory.
#[derive(Clone)]
pub(crate) enum Host {
    /// A world of one.
    Solo,
    #[cfg(feature = "mpi")]
    Mpi(Arc<World>),
    /// None: only NCCL connects the ranks.
    #[cfg(feature = "nccl")]
    Absent,
}

/// Evaluates to `alone` in a world of one, to `over_mpi` with MPI's world, else to an error.
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
