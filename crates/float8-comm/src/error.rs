//! What can go wrong between ranks, with the values that say which rank and which collective.

use std::time::Duration;

use crate::collective::{Absence, Collective, Difference};

/// What can go wrong between ranks.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CommError {
    /// A launcher's variable is not what it should be.
    #[error("the environment variable {variable} is {value:?}: expected {expected}")]
    Variable {
        /// Its name.
        variable: &'static str,
        /// What it holds.
        value: String,
        /// What it may hold.
        expected: &'static str,
    },
    /// A collective always takes some time.
    #[error("Options::timeout is 0, in which no collective can end: give at least the time that the slowest takes")]
    NoTime,
    /// A launcher sets both variables.
    #[error(
        "the environment variable {present} is set ({value:?}), but {missing} is not: launchers set both; set {missing} too, or \
         unset {present} for a world of one"
    )]
    MissingVariable {
        /// The one that is set.
        present: &'static str,
        /// What it holds.
        value: String,
        /// The one that is not.
        missing: &'static str,
    },
    /// No such rank.
    #[error(
        "the environment variable {variable} says rank {rank}, but {size_variable} says {world_size} ranks, the first of which is 0"
    )]
    RankOutOfRange {
        /// The rank's variable.
        variable: &'static str,
        /// Its value.
        rank: usize,
        /// The world size's variable.
        size_variable: &'static str,
        /// Its value.
        world_size: usize,
    },
    /// The variables of two launchers are set, and they disagree.
    #[error(
        "two launchers disagree: {first} says {first_value}, {second} says {second_value}; unset the variables of the one that did \
         not start this program"
    )]
    TwoLaunchers {
        /// A variable of the first launcher.
        first: &'static str,
        /// What it holds.
        first_value: usize,
        /// A variable of the second launcher.
        second: &'static str,
        /// What the second variable holds.
        second_value: usize,
    },
    /// This build lacks the engine that the world needs.
    #[error(
        "{launcher} started {world_size} ranks, but this program is built without the feature {feature:?}: build it with that feature"
    )]
    FeatureMissing {
        /// Who started the ranks.
        launcher: &'static str,
        /// How many.
        world_size: usize,
        /// The cargo feature that brings what is missing.
        feature: &'static str,
    },
    /// MPI does not see the ranks that the launcher claims.
    #[error(
        "the environment variable {variable} says {claimed} ranks, but MPI says {confirmed}: start the program with the mpirun of the \
         MPI that it was built with ({library}), or unset {variable}"
    )]
    WorldNotConfirmed {
        /// The launcher's variable.
        variable: &'static str,
        /// What it holds.
        claimed: usize,
        /// What MPI says.
        confirmed: usize,
        /// The MPI library's name and version.
        library: String,
    },
    /// MPI starts once in a process.
    #[error("MPI was already started in this process, and starts only once: clone the first communicator")]
    AlreadyStarted,
    /// Collectives are called from any thread, which this MPI does not allow.
    #[error(
        "this MPI provides thread support {provided}, and at least MPI_THREAD_SERIALIZED is needed: install one built with threads"
    )]
    Threads {
        /// The level that it provides.
        provided: String,
    },
    /// MPI has failed, or was given messages that do not fit.
    #[error(
        "MPI failed in {during}: {reason}; if messages do not fit, ranks may be in different collectives: FLOAT8_COMM_COMPARE=1 finds \
         the first"
    )]
    Mpi {
        /// The call, or the collective.
        during: String,
        /// MPI's reason.
        reason: String,
    },
    /// Values on the host travel by MPI alone.
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
        /// How many ranks.
        world_size: usize,
    },
    /// Without MPI the ranks find each other at an address.
    #[error(
        "without MPI the ranks meet at the address in the environment variable NCCL_COMM_ID, which is not set: set it on every rank, for instance NCCL_COMM_ID={example}"
    )]
    NeedsCommId {
        /// An address that may do.
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
    /// The driver cannot order NCCL's work with other work of a device.
    #[error(
        "the NVIDIA driver of rank {rank} has no cuCtxRecordEvent and cuCtxWaitEvent, which CUDA 12.5 brought: install one of CUDA 12.5 \
         or newer"
    )]
    DriverTooOld {
        /// The rank.
        rank: usize,
    },
    /// The rank has no device of its own.
    #[error(
        "rank {rank} (local rank {local_rank}) was given CUDA device {ordinal}, but there are {devices}: start at most as many ranks as there are devices"
    )]
    NoDevice {
        /// The rank.
        rank: usize,
        /// Its number on this machine.
        local_rank: usize,
        /// The device that it was to use.
        ordinal: usize,
        /// How many there are.
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
    /// Chunks must be equal.
    #[error(
        "{operation} of {label:?}: {elements} elements cannot be split among {world_size} ranks; pad them to a multiple"
    )]
    Uneven {
        /// The operation.
        operation: &'static str,
        /// Its label.
        label: String,
        /// How many elements there are.
        elements: usize,
        /// Among how many ranks.
        world_size: usize,
    },
    /// MPI counts in 32 bits.
    #[error(
        "{operation} of {label:?}: {elements} elements of all ranks are more than MPI's limit of {limit} a call; split the call"
    )]
    TooLong {
        /// The operation.
        operation: &'static str,
        /// Its label.
        label: String,
        /// How many elements there are.
        elements: usize,
        /// How many there may be.
        limit: usize,
    },
    /// No such rank.
    #[error("broadcast of {label:?}: there is no rank {root} among {world_size} to send it")]
    NoSuchRoot {
        /// The label.
        label: String,
        /// The rank.
        root: usize,
        /// How many there are.
        world_size: usize,
    },
    /// A collective did not end within [`Options::timeout`](crate::Options::timeout).
    #[error("rank {rank} of {world_size}: {collective} has not ended after {:.1} s: {}", waited.as_secs_f64(), absent(missing))]
    Timeout {
        /// The rank that waited.
        rank: usize,
        /// How many ranks there are.
        world_size: usize,
        /// For what it waited.
        collective: Collective,
        /// How long.
        waited: Duration,
        /// The ranks that are not in this collective, in order. Empty if each of them is.
        missing: Vec<Absence>,
    },
    /// Another rank's communicator is gone, so that a collective cannot end.
    #[error(
        "rank {rank} of {world_size}: {collective} cannot end: rank {left} has dropped its communicator after collective {after}; its own error says why"
    )]
    Left {
        /// The rank that waited.
        rank: usize,
        /// How many ranks there are.
        world_size: usize,
        /// For what it waited.
        collective: Collective,
        /// The rank that left.
        left: usize,
        /// The last collective that it started.
        after: u64,
    },
    /// The communicator was dropped, but not all ranks' were. Logged, and the job is ended.
    #[error("rank {rank} of {world_size} dropped its communicator {:.1} s ago, and {}", waited.as_secs_f64(), failed.map_or_else(|| "another rank still has its own".into(), |rank| format!("rank {rank} needs more of it, so the job ends")))]
    Leave {
        /// The rank that dropped it.
        rank: usize,
        /// How many ranks there are.
        world_size: usize,
        /// How long it has waited for the others.
        waited: Duration,
        /// The first rank that met an error; None if the time limit has come.
        failed: Option<usize>,
    },
    /// The compare mode found ranks in different collectives.
    #[error(transparent)]
    Differs(Box<Difference>),
    /// Ranks that must agree do not.
    #[error("{what} is not the same on all ranks; the first difference{}: {first:?} on rank 0, {other:?} on rank {rank}", line.map_or_else(String::new, |line| format!(" is in line {line}")))]
    Disagree {
        /// On what.
        what: String,
        /// The first rank that differs from rank 0.
        rank: usize,
        /// The first line that differs, from 1, if the text has several.
        line: Option<usize>,
        /// What rank 0 has there.
        first: String,
        /// What that rank has there.
        other: String,
    },
    /// A rank has an error of its own.
    #[error("{what} failed on rank {rank}: {message}")]
    RankFailed {
        /// What it was doing.
        what: String,
        /// The first rank with an error.
        rank: usize,
        /// Its error.
        message: String,
    },
    /// Nothing can be sent any more.
    #[error("the communicator ended with an earlier error: {cause}")]
    Dead {
        /// The error.
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
