//! [`ShardError`]: errors of ranks and of models to shard.
use std::time::Duration;

use burn_float8::{ApplyError, Float8Error};

use crate::comm::{Absence, Collective, Difference};

/// Error of the ranks of a job, or of a model that cannot be sharded.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ShardError {
    /// The launcher's environment variables are invalid, MPI reports other ranks, or this build has
    /// no MPI.
    #[error("{0}")]
    Launcher(String),
    /// MPI has failed.
    #[error("MPI failed in {during}: {reason}")]
    Mpi {
        /// The call or the collective.
        during: String,
        /// Reason from MPI.
        reason: String,
    },
    /// CUDA cannot be used.
    #[error("CUDA is not usable on rank {rank}: {reason}")]
    Cuda {
        /// The rank.
        rank: usize,
        /// The driver's reason.
        reason: String,
    },
    /// NCCL is missing or has failed.
    #[error("NCCL failed in {during} on rank {rank}: {reason}")]
    Nccl {
        /// The call or the collective.
        during: String,
        /// The rank.
        rank: usize,
        /// NCCL's reason.
        reason: String,
    },
    /// The elements cannot be exchanged.
    #[error("{operation} of {label:?}: {reason}")]
    Input {
        /// The operation.
        operation: &'static str,
        /// Its label.
        label: String,
        /// Numbers of elements and ranks.
        reason: String,
    },
    /// A collective did not end within the time limit, `FLOAT8_COMM_TIMEOUT`.
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
    /// Ranks are in different collectives.
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
        cause: Box<ShardError>,
    },
    /// The mesh has another number of ranks than the job.
    #[error(
        "parallelism.replicate = {replicate}, shard = {shard} and tensor = {tensor} do not make {ranks} ranks: their product is the \
         number of ranks, and shard = -1 takes the rest"
    )]
    Mesh {
        /// [`ShardConfig::replicate`](crate::ShardConfig::replicate).
        replicate: usize,
        /// [`ShardConfig::shard`](crate::ShardConfig::shard).
        shard: i64,
        /// [`ShardConfig::tensor`](crate::ShardConfig::tensor).
        tensor: usize,
        /// Number of ranks.
        ranks: usize,
    },
    /// The configuration of FP8, or a pattern of a plan, does not fit the model.
    #[error(transparent)]
    Float8(#[from] Float8Error),
    /// A parameter, or the whole model, cannot be sharded.
    #[error("{name}{reason}")]
    Model {
        /// The parameter, or "the model".
        name: String,
        /// Reason, which continues the name.
        reason: String,
    },
}

impl ShardError {
    pub(crate) fn model(name: impl Into<String>, reason: impl Into<String>) -> Self {
        Self::Model { name: name.into(), reason: reason.into() }
    }
}

impl<M> From<ApplyError<M, ShardError>> for ShardError {
    fn from(error: ApplyError<M, ShardError>) -> Self {
        error.error
    }
}

fn absent(missing: &[Absence]) -> String {
    if missing.is_empty() {
        return "every rank is in it, so the transfer itself is too slow for the time limit, or a rank came late"
            .into();
    }
    let each: Vec<_> = missing.iter().map(Absence::to_string).collect();
    each.join("; ")
}
