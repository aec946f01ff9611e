//! State of MPI in this process: its communicators, behind one lock, and the known state of other
//! ranks.

use std::any::Any;
use std::ffi::{c_char, c_int};
use std::fmt::Display;
use std::time::Duration;

use ::mpi::environment::Universe;
use ::mpi::ffi::{self, MPI_Comm, MPI_Request};
use ::mpi::{Threading, environment};
use parking_lot::{Mutex, MutexGuard};

use super::wire::ENCODED;
use crate::error::CommError;
use crate::launch::Launch;
use crate::options::Options;

/// MPI's world. Dropping it leaves in order, or ends the job if an error prevents that.
pub(crate) struct World {
    pub rank: usize,
    pub size: usize,
    pub local_rank: usize,
    pub timeout: Duration,
    /// Whether NCCL's collectives are compared too.
    #[cfg(feature = "nccl")]
    pub compare: bool,
    /// Held while a collective takes its number and starts, so that threads start collectives in
    /// the order of their numbers. Locked before `state`.
    pub order: Mutex<()>,
    state: Mutex<State>,
}

/// State for MPI calls, and messages received from other ranks.
pub(crate) struct State {
    /// Communicator of the collectives.
    pub data: MPI_Comm,
    /// Communicator of the messages about collectives, and of the barrier at the end.
    pub control: MPI_Comm,
    /// None once the world has ended.
    pub universe: Option<Universe>,
    /// Number of collectives that this rank has started.
    pub started: u64,
    /// By rank: last collective before it left.
    pub left: Vec<Option<u64>>,
    /// By rank: encoded collective in which it gave up.
    pub calls: Vec<Option<[u8; ENCODED]>>,
    /// Whether this rank has notified the others that it gave up.
    pub called: bool,
    /// Error that ended the world.
    pub dead: Option<CommError>,
    /// Dropped transfers that are still in flight.
    pub orphans: Vec<Orphan>,
}

/// Dropped transfer, with the buffers that MPI still uses.
pub(crate) struct Orphan {
    pub request: MPI_Request,
    pub _buffers: Box<dyn Any + Send>,
}

// SAFETY: with MPI_THREAD_SERIALIZED, which `connect` checks, any thread may use MPI's handles as
// long as calls do not overlap. All calls hold the lock of `World::state`.
unsafe impl Send for State {}

impl World {
    /// Starts MPI and compares its world with the launcher's variables.
    pub(crate) fn connect(launch: &Launch, options: Options) -> Result<Self, CommError> {
        let (universe, threading) =
            environment::initialize_with_threading(Threading::Multiple).ok_or(CommError::AlreadyStarted)?;
        if !matches!(threading, Threading::Serialized | Threading::Multiple) {
            return Err(CommError::Threads { provided: format!("{threading:?}") });
        }
        // SAFETY: MPI has started, and its world is a communicator.
        let (rank, size, local_rank, data, control) = unsafe {
            let world = ffi::RSMPI_COMM_WORLD;
            // Errors are returned instead of ending the job; duplicates inherit this handler.
            check("MPI_Comm_set_errhandler", ffi::MPI_Comm_set_errhandler(world, ffi::RSMPI_ERRORS_RETURN))?;
            let (rank, size) = (rank_of(world)?, size_of(world)?);
            let mut machine = ffi::RSMPI_COMM_NULL;
            let (shared, info) = (ffi::RSMPI_COMM_TYPE_SHARED, ffi::RSMPI_INFO_NULL);
            let split = ffi::MPI_Comm_split_type(world, shared, rank as c_int, info, &mut machine);
            check("MPI_Comm_split_type", split)?;
            let local_rank = rank_of(machine)?;
            check("MPI_Comm_free", ffi::MPI_Comm_free(&mut machine))?;
            (rank, size, local_rank, duplicate(world)?, duplicate(world)?)
        };
        if size != launch.world_size {
            return Err(CommError::WorldNotConfirmed {
                variable: launch.size_variable,
                claimed: launch.world_size,
                confirmed: size,
                library: library_version(),
            });
        }
        let state = State {
            data,
            control,
            universe: Some(universe),
            started: 0,
            left: vec![None; size],
            calls: vec![None; size],
            called: false,
            dead: None,
            orphans: Vec::new(),
        };
        Ok(Self {
            rank,
            size,
            local_rank,
            timeout: options.timeout,
            #[cfg(feature = "nccl")]
            compare: options.compare,
            order: Mutex::new(()),
            state: Mutex::new(state),
        })
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }
}

impl State {
    /// Returns an error if an earlier one ended the world.
    pub(crate) fn alive(&self) -> Result<(), CommError> {
        self.dead.as_ref().map_or(Ok(()), |cause| Err(CommError::Dead { cause: Box::new(cause.clone()) }))
    }

    /// Whether the transfer is done; `request` is null afterwards.
    pub(crate) fn test(&mut self, request: &mut MPI_Request, during: &dyn Display) -> Result<bool, CommError> {
        let mut done = 0;
        // SAFETY: the request comes from MPI, and its buffers live until it is done.
        let code = unsafe { ffi::MPI_Test(request, &mut done, ffi::RSMPI_STATUS_IGNORE) };
        check(during, code)?;
        Ok(done != 0)
    }

    /// Frees the buffers of dropped transfers that are done.
    pub(crate) fn test_orphans(&mut self) -> Result<(), CommError> {
        let mut orphans = std::mem::take(&mut self.orphans);
        let mut result = Ok(());
        orphans.retain_mut(|orphan| {
            result.is_err()
                || match self.test(&mut orphan.request, &"a dropped collective") {
                    Ok(done) => !done,
                    Err(error) => {
                        result = Err(error);
                        true
                    }
                }
        });
        self.orphans = orphans;
        result
    }
}

/// Converts a return code of MPI to a result.
pub(crate) fn check(during: impl Display, code: c_int) -> Result<(), CommError> {
    if code == ffi::MPI_SUCCESS as c_int {
        return Ok(());
    }
    let mut text = [0_u8; 4096];
    let mut length = 0;
    // SAFETY: the buffer is longer than MPI_MAX_ERROR_STRING of any MPI.
    unsafe { ffi::MPI_Error_string(code, text.as_mut_ptr().cast::<c_char>(), &mut length) };
    let length = usize::try_from(length).unwrap_or(0).min(text.len());
    let reason = format!("{} (code {code})", String::from_utf8_lossy(&text[..length]));
    Err(CommError::Mpi { during: during.to_string(), reason })
}

unsafe fn rank_of(comm: MPI_Comm) -> Result<usize, CommError> {
    let mut rank = 0;
    check("MPI_Comm_rank", unsafe { ffi::MPI_Comm_rank(comm, &mut rank) })?;
    Ok(rank as usize)
}

unsafe fn size_of(comm: MPI_Comm) -> Result<usize, CommError> {
    let mut size = 0;
    check("MPI_Comm_size", unsafe { ffi::MPI_Comm_size(comm, &mut size) })?;
    Ok(size as usize)
}

unsafe fn duplicate(comm: MPI_Comm) -> Result<MPI_Comm, CommError> {
    let mut copy = unsafe { ffi::RSMPI_COMM_NULL };
    check("MPI_Comm_dup", unsafe { ffi::MPI_Comm_dup(comm, &mut copy) })?;
    Ok(copy)
}

/// First line of the version. Some libraries include the terminating zero.
fn library_version() -> String {
    let version = environment::library_version().unwrap_or_default();
    version.lines().next().unwrap_or_default().trim_end_matches('\0').into()
}
