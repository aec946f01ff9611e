//! Errors between ranks, with the rank and the collective.

use std::time::Duration;

use crate::collective::{Absence, Collective, Difference};

/// Error between ranks.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CommError {
    /// A launcher's variable has an invalid value.
    #[error("the environment variable {variable} is {value:?}: expected {expected}")]
    Variable {
        /// Name of the variable.
        variable: &'static str,
        /// Its value.
        value: String,
        /// Expected form of the value.
        expected: &'static str,
    },
    /// The time limit is 0.
    #[error("Options::timeout is 0, in which no collective can end: give at least the time that the slowest takes")]
    NoTime,
    /// Only one of a launcher's two variables is set.
    #[error(
        "the environment variable {present} is set ({value:?}), but {missing} is not: launchers set both; set {missing} too, or \
         unset {present} for a world of one"
    )]
    MissingVariable {
        /// The variable that is set.
        present: &'static str,
        /// Its value.
        value: String,
        /// The variable that is not set.
        missing: &'static str,
    },
    /// The rank is not less than the world size.
    #[error(
        "the environment variable {variable} says rank {rank}, but {size_variable} says {world_size} ranks, the first of which is 0"
    )]
    RankOutOfRange {
        /// Variable of the rank.
        variable: &'static str,
        /// Its value.
        rank: usize,
        /// Variable of the world size.
        size_variable: &'static str,
        /// Its value.
        world_size: usize,
    },
    /// The variables of two launchers disagree.
    #[error(
        "two launchers disagree: {first} says {first_value}, {second} says {second_value}; unset the variables of the one that did \
         not start this program"
    )]
    TwoLaunchers {
        /// Variable of the first launcher.
        first: &'static str,
        /// Its value.
        first_value: usize,
        /// Variable of the second launcher.
        second: &'static str,
        /// Its value.
        second_value: usize,
    },
    /// This build lacks the engine that the world needs.
    #[error(
        "{launcher} started {world_size} ranks, but this program is built without the feature {feature:?}: build it with that feature"
    )]
    FeatureMissing {
        /// Launcher of the ranks.
        launcher: &'static str,
        /// Number of ranks.
        world_size: usize,
        /// The cargo feature that adds the engine.
        feature: &'static str,
    },
    /// MPI reports another number of ranks than the launcher.
    #[error(
        "the environment variable {variable} says {claimed} ranks, but MPI says {confirmed}: start the program with the mpirun of the \
         MPI that it was built with ({library}), or unset {variable}"
    )]
    WorldNotConfirmed {
        /// Variable of the launcher.
        variable: &'static str,
        /// Its value.
        claimed: usize,
        /// Number of ranks according to MPI.
        confirmed: usize,
        /// Name and version of the MPI library.
        library: String,
    },
    /// MPI can start only once in a process.
    #[error("MPI was already started in this process, and starts only once: clone the first communicator")]
    AlreadyStarted,
    /// This MPI does not allow calls from any thread.
    #[error(
        "this MPI provides thread support {provided}, and at least MPI_THREAD_SERIALIZED is needed: install one built with threads"
    )]
    Threads {
        /// Thread support level of this MPI.
        provided: String,
    },
    /// MPI has failed, or received messages of the wrong size.
    #[error(
        "MPI failed in {during}: {reason}; if messages do not fit, ranks may be in different collectives: FLOAT8_COMM_COMPARE=1 finds \
         the first"
    )]
    Mpi {
        /// The call or the collective.
        during: String,
        /// Reason from MPI.
        reason: String,
    },
    /// Collectives on host memory need MPI.
    #[error(
        "{operation} of {label:?} is on the host's memory, which needs MPI: start the ranks with mpirun, in a build with the feature \"mpi\""
    )]
    NeedsMpi {
        /// The operation.
        operation: &'static str,
        /// Its label.
        label: String,
    },
    /// torchrun starts no MPI.
    #[error(
        "torchrun started {world_size} ranks, which can meet through NCCL alone: train on CUDA devices, or start the ranks with mpirun"
    )]
    NeedsNccl {
        /// Number of ranks.
        world_size: usize,
    },
    /// Without MPI the ranks need an address to connect.
    #[error(
        "without MPI the ranks meet at the address in the environment variable NCCL_COMM_ID, which is not set: set it on every rank, for instance NCCL_COMM_ID={example}"
    )]
    NeedsCommId {
        /// Example of an address.
        example: String,
    },
    /// NCCL cannot be loaded.
    #[error(
        "NCCL is not installed: no libnccl.so in the loader's path; install Debian's or NVIDIA's libnccl-dev, or, as PyPI's nvidia-nccl \
         wheels have libnccl.so.2 alone, make a link libnccl.so to it and put its folder into LD_LIBRARY_PATH"
    )]
    NcclMissing,
    /// CUDA cannot be used.
    #[error("CUDA is not usable on rank {rank}: {reason}")]
    Cuda {
        /// The rank.
        rank: usize,
        /// The driver's reason.
        reason: String,
    },
    /// The driver cannot order NCCL's streams with other work of a device.
    #[error(
        "the NVIDIA driver of rank {rank} has no cuCtxRecordEvent and cuCtxWaitEvent, which CUDA 12.5 brought: install one of CUDA 12.5 \
         or newer"
    )]
    DriverTooOld {
        /// The rank.
        rank: usize,
    },
    /// No CUDA device exists for the rank.
    #[error(
        "rank {rank} (local rank {local_rank}) was given CUDA device {ordinal}, but there are {devices}: start at most as many ranks as there are devices"
    )]
    NoDevice {
        /// The rank.
        rank: usize,
        /// Its index on this machine.
        local_rank: usize,
        /// Ordinal of the requested device.
        ordinal: usize,
        /// Number of devices.
        devices: usize,
    },
    /// NCCL has failed.
    #[error("NCCL failed in {during} on rank {rank}: {reason}")]
    Nccl {
        /// The call, or the collective.
        during: String,
        /// The rank.
        rank: usize,
        /// NCCL's reason.
        reason: String,
    },
    /// The elements do not divide into equal chunks.
    #[error(
        "{operation} of {label:?}: {elements} elements cannot be split among {world_size} ranks; pad them to a multiple"
    )]
    Uneven {
        /// The operation.
        operation: &'static str,
        /// Its label.
        label: String,
        /// Number of elements.
        elements: usize,
        /// Number of ranks.
        world_size: usize,
    },
    /// The elements exceed MPI's 32-bit counts.
    #[error(
        "{operation} of {label:?}: {elements} elements of all ranks are more than MPI's limit of {limit} a call; split the call"
    )]
    TooLong {
        /// The operation.
        operation: &'static str,
        /// Its label.
        label: String,
        /// Number of elements.
        elements: usize,
        /// Largest number of elements.
        limit: usize,
    },
    /// The root of a broadcast is not a rank.
    #[error("broadcast of {label:?}: there is no rank {root} among {world_size} to send it")]
    NoSuchRoot {
        /// The label.
        label: String,
        /// The rank.
        root: usize,
        /// Number of ranks.
        world_size: usize,
    },
    /// A collective did not end within [`Options::timeout`](crate::Options::timeout).
    #[error("rank {rank} of {world_size}: {collective} has not ended after {:.1} s: {}", waited.as_secs_f64(), absent(missing))]
    Timeout {
        /// The rank that waited.
        rank: usize,
        /// Number of ranks.
        world_size: usize,
        /// The collective that it waited in.
        collective: Collective,
        /// Time waited.
        waited: Duration,
        /// Ranks that are missing from the collective, in order. Empty if all are in it.
        missing: Vec<Absence>,
    },
    /// Another rank has dropped its communicator, so the collective cannot end.
    #[error(
        "rank {rank} of {world_size}: {collective} cannot end: rank {left} has dropped its communicator after collective {after}; its own error says why"
    )]
    Left {
        /// The rank that waited.
        rank: usize,
        /// Number of ranks.
        world_size: usize,
        /// The collective that it waited in.
        collective: Collective,
        /// The rank that left.
        left: usize,
        /// The last collective that it started.
        after: u64,
    },
    /// This rank has dropped its communicator, but other ranks keep theirs. Logged; then the job
    /// ends.
    #[error("rank {rank} of {world_size} dropped its communicator {:.1} s ago, and {}", waited.as_secs_f64(), failed.map_or_else(|| "another rank still has its own".into(), |rank| format!("rank {rank} needs more of it, so the job ends")))]
    Leave {
        /// The rank that dropped it.
        rank: usize,
        /// Number of ranks.
        world_size: usize,
        /// Time waited for the other ranks.
        waited: Duration,
        /// First rank with an error; None at the time limit.
        failed: Option<usize>,
    },
    /// The compare mode found ranks in different collectives.
    #[error(transparent)]
    Differs(Box<Difference>),
    /// A value that must be equal differs between ranks.
    #[error("{what} is not the same on all ranks; the first difference{}: {first:?} on rank 0, {other:?} on rank {rank}", line.map_or_else(String::new, |line| format!(" is in line {line}")))]
    Disagree {
        /// Name of the value.
        what: String,
        /// First rank that differs from rank 0.
        rank: usize,
        /// First line that differs, from 1, if the text has several.
        line: Option<usize>,
        /// Text of rank 0 at the difference.
        first: String,
        /// Text of the other rank at the difference.
        other: String,
    },
    /// A local step failed on a rank.
    #[error("{what} failed on rank {rank}: {message}")]
    RankFailed {
        /// Name of the step.
        what: String,
        /// First rank with an error.
        rank: usize,
        /// Its error.
        message: String,
    },
    /// An earlier error has ended the communicator.
    #[error("the communicator ended with an earlier error: {cause}")]
    Dead {
        /// The earlier error.
        cause: Box<CommError>,
    },
}

fn absent(missing: &[Absence]) -> String {
    if missing.is_empty() {
        return "every rank is in it, so the transfer itself is too slow for the time limit, or a rank came late"
            .into();
    }
    let each: Vec<_> = missing.iter().map(Absence::to_string).collect();
    each.join("; ")
}
