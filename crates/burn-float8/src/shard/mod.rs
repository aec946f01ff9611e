//! Weights of which each rank keeps some rows (FSDP, ZeRO-3): what is gathered before a GEMM, and how gradients come back.
//!
//! ```text
//! rank r of R holds rows [r·chunk, (r + 1)·chunk) of w [K, N], zeros beyond K        chunk = ⌈⌈K / R⌉ / align⌉ · align
//! fprop, dgrad   cast own rows → all-gather codes and scales → GEMM
//! wgrad          GEMM → reduce-scatter dw: each rank gets the sum of its rows over all ranks
//! ```
//!
//! The parameter is the shard, so that optimizers which look at one element at a time work on it unchanged.
mod device;
mod error;
mod operand;
mod values;

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

pub use error::ShardError;
use float8_comm::Communicator;
use serde::{Deserialize, Serialize};
pub(crate) use values::{Amax, column_amaxes, tensor_amax};

/// How long the whole of a weight lives that was gathered from all ranks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Reshard {
    /// Until the optimizer replaces the weight: two gathers for each linear and step, over all micro-batches.
    #[default]
    AfterStep,
    /// Until the GEMM that reads it has been launched: two gathers for each linear and micro-batch, and no memory in between.
    AfterForward,
}

/// How a model is sharded.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ShardConfig {
    /// How long gathered weights live.
    pub reshard: Reshard,
}

/// Which rows of one weight `[K, N]` this rank holds, and what it has moved.
#[derive(Debug)]
pub(crate) struct Sharding {
    comm: Communicator,
    name: String,
    /// K and N.
    logical: [usize; 2],
    chunk: usize,
    config: ShardConfig,
    float8_gathers: AtomicU64,
    full_gathers: AtomicU64,
}

impl Sharding {
    /// Shards of `align` rows or a multiple; all rows in a world of one.
    pub(crate) fn new(comm: Communicator, name: &str, logical: [usize; 2], align: usize, config: ShardConfig) -> Self {
        let chunk = match comm.world_size() {
            1 => logical[0],
            ranks => logical[0].div_ceil(ranks).next_multiple_of(align),
        };
        let zero = || AtomicU64::new(0);
        Self { comm, name: name.into(), logical, chunk, config, float8_gathers: zero(), full_gathers: zero() }
    }

    /// K and N of the whole weight.
    pub(crate) fn logical(&self) -> [usize; 2] {
        self.logical
    }

    /// Rows that each rank holds, padding included.
    pub(crate) fn chunk(&self) -> usize {
        self.chunk
    }

    /// The rows of the whole weight that this rank holds: as many as [`chunk`](Self::chunk), or fewer at the end.
    pub(crate) fn rows(&self) -> Range<usize> {
        let at = |rank: usize| (rank * self.chunk).min(self.logical[0]);
        at(self.comm.rank())..at(self.comm.rank() + 1)
    }

    /// Whether what was gathered is kept for the next GEMM that reads the same weight.
    pub(crate) fn keeps_gathered(&self) -> bool {
        self.config.reshard == Reshard::AfterStep
    }

    /// Gathers so far: of FP8 codes, and in high precision.
    pub(crate) fn gathers(&self) -> [u64; 2] {
        [&self.float8_gathers, &self.full_gathers].map(|count| count.load(Relaxed))
    }

    /// Ends this rank's part in the job: operations of a backend return no errors.
    fn fail(&self, error: impl core::fmt::Display) -> ! {
        panic!("{}: {error}", self.name)
    }
}
