//! The ranks of one job, as started by the launcher, and their engine.

use std::fmt;
use std::sync::Arc;

use parking_lot::Mutex;

use crate::error::CommError;
use crate::host::Host;
use crate::launch::{Launch, Launcher, Lookup};
#[cfg(feature = "mpi")]
use crate::mpi::World;
#[cfg(feature = "nccl")]
use crate::nccl::NcclComm;
use crate::options::Options;
use crate::traffic::Traffic;

/// Transport of the collectives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Engine {
    /// None: a world of one rank.
    Solo,
    /// MPI, on host memory.
    Mpi,
    /// NCCL, on the memory of CUDA devices.
    Nccl,
}

impl Engine {
    /// `solo`, `mpi` or `nccl`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Solo => "solo",
            Self::Mpi => "mpi",
            Self::Nccl => "nccl",
        }
    }
}

impl fmt::Display for Engine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Handle to the ranks of one job. Cheap to clone.
///
/// All ranks call every collective in the same order, from any thread. `label` names the purpose,
/// such as the layer, in errors and in [`Traffic`].
///
/// After an error of a collective every later one returns [`CommError::Dead`]. When the last clone
/// is then dropped, the job ends within a second unless the process has returned first, so print
/// the error at once.
///
/// Without an error, dropping the last clone waits until every rank has dropped its own, at most
/// [`Options::timeout`].
#[derive(Clone)]
pub struct Communicator(Arc<Inner>);

struct Inner {
    rank: usize,
    local_rank: usize,
    world_size: usize,
    /// Dropped before MPI ends.
    #[cfg(feature = "nccl")]
    nccl: Option<NcclComm>,
    host: Host,
    traffic: Arc<Mutex<Traffic>>,
}

impl fmt::Debug for Communicator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Communicator(rank {} of {}, {})", self.rank(), self.world_size(), self.engine())
    }
}

impl Inner {
    fn new(rank: usize, local_rank: usize, world_size: usize, host: Host) -> Self {
        let traffic = Arc::default();
        Self {
            rank,
            local_rank,
            world_size,
            #[cfg(feature = "nccl")]
            nccl: None,
            host,
            traffic,
        }
    }

    fn engine(&self) -> Engine {
        #[cfg(feature = "nccl")]
        if self.nccl.is_some() {
            return Engine::Nccl;
        }
        match self.host {
            Host::Solo => Engine::Solo,
            #[cfg(feature = "mpi")]
            Host::Mpi(_) => Engine::Mpi,
            #[cfg(feature = "nccl")]
            Host::Absent => Engine::Nccl,
        }
    }
}

impl Communicator {
    /// World of one rank, whose collectives return their input.
    pub fn solo() -> Self {
        Self(Arc::new(Inner::new(0, 0, 1, Host::Solo)))
    }

    /// World that the launcher started: the ranks of mpirun over MPI, or one rank without a
    /// launcher. The ranks of torchrun need `from_env_nccl`.
    ///
    /// Worlds of several ranks also install a panic hook: a panic of any thread, caught or not,
    /// ends the job. Call this once in each process. MPI requires that the thread that created the
    /// communicator also drops it.
    ///
    /// # Errors
    /// Invalid or contradictory variables; a build without the feature that the launcher needs; an
    /// MPI that does not confirm the launcher.
    pub fn from_env(options: Options) -> Result<Self, CommError> {
        Self::from_variables(options, &variable)
    }

    fn from_variables(options: Options, lookup: Lookup) -> Result<Self, CommError> {
        let options = options.read(lookup)?;
        match Launch::read(lookup)? {
            None => Ok(Self::solo()),
            Some(Launch { world_size: 1, .. }) => Ok(Self::solo()),
            Some(launch) if launch.launcher == Launcher::Mpi => Self::over_mpi(&launch, options),
            Some(Launch { world_size, .. }) if cfg!(feature = "nccl") => Err(CommError::NeedsNccl { world_size }),
            Some(Launch { world_size, launcher, .. }) => {
                Err(CommError::FeatureMissing { launcher: launcher.name(), world_size, feature: "nccl" })
            }
        }
    }

    #[cfg(feature = "mpi")]
    fn over_mpi(launch: &Launch, options: Options) -> Result<Self, CommError> {
        let world = World::connect(launch, options)?;
        crate::panics::end_on_panic(world.rank, world.size, crate::mpi::end_after_panic);
        Ok(Self(Arc::new(Inner::new(world.rank, world.local_rank, world.size, Host::Mpi(Arc::new(world))))))
    }

    #[cfg(not(feature = "mpi"))]
    fn over_mpi(launch: &Launch, _options: Options) -> Result<Self, CommError> {
        let (launcher, world_size) = (launch.launcher.name(), launch.world_size);
        Err(CommError::FeatureMissing { launcher, world_size, feature: "mpi" })
    }

    /// World that the launcher started, with NCCL between the CUDA devices of its ranks. `device`
    /// is the ordinal of this rank's device; the default is its local rank. A world of one is
    /// [`solo`](Self::solo), which needs no NCCL.
    ///
    /// The ranks of mpirun connect over MPI and also have the collectives on host memory. The ranks
    /// of torchrun, and all ranks without the feature `mpi`, connect at the address in
    /// `NCCL_COMM_ID` and have only the collectives on device memory.
    ///
    /// # Errors
    /// The errors of [`from_env`](Self::from_env); missing NCCL, CUDA or device, reported on every
    /// rank if MPI is available.
    #[cfg(feature = "nccl")]
    pub fn from_env_nccl(options: Options, device: Option<usize>) -> Result<Self, CommError> {
        Self::from_variables_nccl(options, device, &variable)
    }

    #[cfg(feature = "nccl")]
    fn from_variables_nccl(options: Options, device: Option<usize>, lookup: Lookup) -> Result<Self, CommError> {
        let options = options.read(lookup)?;
        let Some(launch) = Launch::read(lookup)?.filter(|launch| launch.world_size > 1) else {
            return Ok(Self::solo());
        };
        let host = if launch.launcher == Launcher::Mpi && cfg!(feature = "mpi") {
            Self::over_mpi(&launch, options)?
        } else {
            // Ranks without a local rank count as ranks of one machine.
            let local_rank = launch.local_rank.unwrap_or(launch.rank);
            crate::panics::end_on_panic(launch.rank, launch.world_size, || std::process::abort());
            Self(Arc::new(Inner::new(launch.rank, local_rank, launch.world_size, Host::Absent)))
        };
        host.connected(options, device, lookup)
    }

    #[cfg(feature = "nccl")]
    fn connected(&self, options: Options, device: Option<usize>, lookup: Lookup) -> Result<Self, CommError> {
        if self.has_host_collectives() {
            // A rank in the compare mode would wait for messages that the others never send.
            self.agree("the communicator's options", &format!("{options:?}"))?;
        }
        let nccl = NcclComm::connect(self, device, options, lookup)?;
        let Inner { rank, local_rank, world_size, .. } = *self.0;
        let (traffic, host) = (Arc::clone(&self.0.traffic), self.0.host.clone());
        Ok(Self(Arc::new(Inner { rank, local_rank, world_size, nccl: Some(nccl), host, traffic })))
    }

    /// Adds NCCL between the CUDA devices of these ranks, for programs that decide after
    /// [`from_env`](Self::from_env). All ranks call it. A world of one, or one that already has
    /// NCCL, is returned unchanged.
    ///
    /// # Errors
    /// The errors of [`from_env_nccl`](Self::from_env_nccl).
    #[cfg(feature = "nccl")]
    pub fn with_nccl(&self, options: Options, device: Option<usize>) -> Result<Self, CommError> {
        if self.world_size() == 1 || self.nccl().is_some() {
            return Ok(self.clone());
        }
        self.connected(options.read(&variable)?, device, &variable)
    }

    /// Collectives on device memory, if this world uses NCCL.
    #[cfg(feature = "nccl")]
    pub fn nccl(&self) -> Option<&NcclComm> {
        self.0.nccl.as_ref()
    }

    /// Whether collectives on host memory are available. Ranks that only NCCL connects have none.
    pub fn has_host_collectives(&self) -> bool {
        #[cfg(feature = "nccl")]
        if matches!(self.0.host, Host::Absent) {
            return false;
        }
        true
    }

    #[cfg(all(feature = "mpi", feature = "nccl"))]
    pub(crate) fn mpi_world(&self) -> Option<Arc<World>> {
        match &self.0.host {
            Host::Mpi(world) => Some(Arc::clone(world)),
            _ => None,
        }
    }

    pub(crate) fn host(&self) -> &Host {
        &self.0.host
    }

    pub(crate) fn counter(&self) -> &Arc<Mutex<Traffic>> {
        &self.0.traffic
    }

    /// Index of this rank, from 0.
    pub fn rank(&self) -> usize {
        self.0.rank
    }

    /// Index among the ranks of this machine.
    pub fn local_rank(&self) -> usize {
        self.0.local_rank
    }

    /// Number of ranks.
    pub fn world_size(&self) -> usize {
        self.0.world_size
    }

    /// Transport of the collectives.
    pub fn engine(&self) -> Engine {
        self.0.engine()
    }

    /// Traffic of this rank since the start.
    pub fn traffic(&self) -> Traffic {
        self.0.traffic.lock().clone()
    }
}

fn variable(name: &str) -> Option<String> {
    // A value that is not UTF-8 is not a number either, and the error for numbers reports it.
    std::env::var_os(name).map(|value| value.to_string_lossy().into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn started(variables: &[(&str, &str)]) -> Result<Communicator, CommError> {
        let lookup = |name: &str| variables.iter().find(|(known, _)| *known == name).map(|(_, value)| (*value).into());
        Communicator::from_variables(Options::default(), &lookup)
    }

    #[test]
    fn one_rank_needs_no_engine() {
        for variables in [&[][..], &[("RANK", "0"), ("WORLD_SIZE", "1")], &[("PMI_RANK", "0"), ("PMI_SIZE", "1")]] {
            let comm = started(variables).unwrap();
            assert_eq!((comm.rank(), comm.local_rank(), comm.world_size(), comm.engine()), (0, 0, 1, Engine::Solo));
            assert!(comm.has_host_collectives());
            assert_eq!(format!("{comm:?}"), "Communicator(rank 0 of 1, solo)");
        }
    }

    #[cfg(not(feature = "mpi"))]
    #[test]
    fn a_build_without_mpi_says_so() {
        let error = started(&[("OMPI_COMM_WORLD_RANK", "1"), ("OMPI_COMM_WORLD_SIZE", "2")]).unwrap_err();
        let CommError::FeatureMissing { launcher: "mpirun", world_size: 2, feature: "mpi" } = error else {
            panic!("{error}")
        };
    }

    #[test]
    fn torchrun_needs_nccl() {
        let error = started(&[("RANK", "1"), ("WORLD_SIZE", "2")]).unwrap_err();
        let named = match error {
            CommError::NeedsNccl { world_size: 2 } => cfg!(feature = "nccl"),
            CommError::FeatureMissing { launcher: "torchrun", world_size: 2, feature: "nccl" } => {
                !cfg!(feature = "nccl")
            }
            _ => false,
        };
        assert!(named, "{error}");
    }
}
