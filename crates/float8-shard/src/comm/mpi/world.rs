//! State of MPI in this process: its communicators, behind one lock, and the known state of other
//! ranks.

use std::any::Any;
use std::ffi::{c_char, c_int};
use std::fmt::Display;
use std::mem::ManuallyDrop;
use std::sync::Arc;
use std::time::Duration;

use ::mpi::Threading;
use ::mpi::environment::{self, Universe};
use ::mpi::ffi::{self, MPI_Comm, MPI_Request};
use ::mpi::topology::{Color, SimpleCommunicator};
use ::mpi::traits::{AsRaw, Communicator as _, FromRaw};
use parking_lot::{Mutex, MutexGuard};

use super::wire::ENCODED;
use crate::comm::launch::Launch;
use crate::error::ShardError;

/// MPI's world. Dropping it leaves in order, or ends the job if an error prevents that.
pub(in crate::comm) struct World {
    pub rank: usize,
    pub size: usize,
    pub local_rank: usize,
    pub timeout: Duration,
    /// Held while a collective takes its number and starts, so that threads start collectives in
    /// the order of their numbers. Locked before `state`.
    pub order: Mutex<()>,
    state: Mutex<State>,
}

/// Some ranks of the world, in a communicator of their own.
#[derive(Clone)]
pub(in crate::comm) struct Group {
    pub world: Arc<World>,
    pub comm: Comm,
    /// Their ranks in the world, in order.
    pub members: Arc<[usize]>,
}

/// Handle of a communicator, which is freed with MPI.
#[derive(Clone, Copy)]
pub(in crate::comm) struct Comm(pub MPI_Comm);

// SAFETY: with MPI_THREAD_SERIALIZED, which `connect` checks, any thread may use MPI's handles as
// long as calls do not overlap. All calls hold the lock of `World::state`.
unsafe impl Send for Comm {}
// SAFETY: as above.
unsafe impl Sync for Comm {}

/// State for MPI calls, and messages received from other ranks.
pub(super) struct State {
    /// Communicator of the messages about collectives, and of the barrier at the end.
    pub control: ManuallyDrop<SimpleCommunicator>,
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
    pub dead: Option<ShardError>,
    /// Dropped transfers that are still in flight.
    pub orphans: Vec<Orphan>,
}

/// Dropped transfer, with the buffers that MPI still uses.
pub(super) struct Orphan {
    pub request: MPI_Request,
    pub _buffers: Box<dyn Any + Send>,
}

// SAFETY: as for `Comm`.
unsafe impl Send for State {}

impl Group {
    /// Starts MPI and compares its world with the launcher's variable.
    pub(in crate::comm) fn connect(launch: Launch, timeout: Duration) -> Result<Self, ShardError> {
        let failed = |reason: String| ShardError::Mpi { during: "its start".into(), reason };
        let (universe, threading) = environment::initialize_with_threading(Threading::Multiple)
            .ok_or_else(|| failed("it starts only once in a process: clone the first communicator".into()))?;
        if !matches!(threading, Threading::Serialized | Threading::Multiple) {
            let needed = "at least MPI_THREAD_SERIALIZED is needed: install one built with threads";
            return Err(failed(format!("it provides thread support {threading:?}, and {needed}")));
        }
        // SAFETY: MPI has started. Errors are returned instead of ending the job; duplicates
        // inherit this handler.
        let code = unsafe { ffi::MPI_Comm_set_errhandler(ffi::RSMPI_COMM_WORLD, ffi::RSMPI_ERRORS_RETURN) };
        check("MPI_Comm_set_errhandler", code)?;
        let all = universe.world();
        let (rank, size) = (all.rank() as usize, all.size() as usize);
        let Launch { world_size, variable } = launch;
        if size != world_size {
            // Some libraries include the terminating zero.
            let version = environment::library_version().unwrap_or_default();
            let library = version.lines().next().unwrap_or_default().trim_end_matches('\0');
            return Err(ShardError::Launcher(format!(
                "the environment variable {variable} says {world_size} ranks, but MPI says {size}: start the program with the mpirun \
                 of the MPI that it was built with ({library}), or unset {variable}"
            )));
        }
        let local_rank = all.split_shared(all.rank()).rank() as usize;
        let [data, control] = [(); 2].map(|()| ManuallyDrop::new(all.duplicate()));
        let comm = Comm(data.as_raw());
        let state = State {
            control,
            universe: Some(universe),
            started: 0,
            left: vec![None; size],
            calls: vec![None; size],
            called: false,
            dead: None,
            orphans: Vec::new(),
        };
        let (order, state) = (Mutex::new(()), Mutex::new(state));
        let world = World { rank, size, local_rank, timeout, order, state };
        Ok(Self { world: Arc::new(world), comm, members: (0..size).collect() })
    }

    /// The ranks `part` of this group, which all give the same `color`. All ranks of this group
    /// call it together.
    pub(in crate::comm) fn split(&self, color: usize, part: &[usize]) -> Self {
        let _state = self.world.lock();
        // SAFETY: a live communicator, which is not freed here.
        let whole = ManuallyDrop::new(unsafe { SimpleCommunicator::from_raw(self.comm.0) });
        let split = whole.split_by_color_with_key(Color::with_value(color as c_int), self.rank() as c_int);
        let split = ManuallyDrop::new(split.expect("a color has ranks"));
        let members = part.iter().map(|rank| self.members[*rank]).collect();
        Self { world: self.world.clone(), comm: Comm(split.as_raw()), members }
    }

    /// Index of this rank among them.
    pub(in crate::comm) fn rank(&self) -> usize {
        self.members.iter().position(|rank| *rank == self.world.rank).expect("this rank is one of them")
    }

    pub(in crate::comm) fn size(&self) -> usize {
        self.members.len()
    }
}

impl World {
    pub(super) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }
}

impl State {
    /// Returns an error if an earlier one ended the world.
    pub(super) fn alive(&self) -> Result<(), ShardError> {
        self.dead.as_ref().map_or(Ok(()), |cause| Err(ShardError::Dead { cause: Box::new(cause.clone()) }))
    }

    /// Whether the transfer is done; `request` is null afterwards.
    pub(super) fn test(&mut self, request: &mut MPI_Request, during: &dyn Display) -> Result<bool, ShardError> {
        let mut done = 0;
        // SAFETY: the request comes from MPI, and its buffers live until it is done.
        let code = unsafe { ffi::MPI_Test(request, &mut done, ffi::RSMPI_STATUS_IGNORE) };
        check(during, code)?;
        Ok(done != 0)
    }

    /// Frees the buffers of dropped transfers that are done.
    pub(super) fn test_orphans(&mut self) -> Result<(), ShardError> {
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
pub(super) fn check(during: impl Display, code: c_int) -> Result<(), ShardError> {
    if code == ffi::MPI_SUCCESS as c_int {
        return Ok(());
    }
    let mut text = [0_u8; 4096];
    let mut length = 0;
    // SAFETY: the buffer is longer than MPI_MAX_ERROR_STRING of any MPI.
    unsafe { ffi::MPI_Error_string(code, text.as_mut_ptr().cast::<c_char>(), &mut length) };
    let length = usize::try_from(length).unwrap_or(0).min(text.len());
    let reason = format!("{} (code {code})", String::from_utf8_lossy(&text[..length]));
    Err(ShardError::Mpi { during: during.to_string(), reason })
}
