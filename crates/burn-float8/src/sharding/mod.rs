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
mod words;

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

pub use error::ShardError;
use float8_comm::Communicator;
pub(crate) use operand::Gathering;
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

/// What ranks exchange of the gradients of sharded parameters. Over MPI they are added in f32 all the same; NCCL adds in this dtype.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ReduceDtype {
    /// f32.
    #[default]
    F32,
    /// Each rank's gradient rounded to bf16: half the bytes.
    Bf16,
}

/// How a model is sharded.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ShardConfig {
    /// How long gathered weights live.
    pub reshard: Reshard,
    /// What is exchanged of gradients.
    pub reduce_dtype: ReduceDtype,
}

/// Rows of K that each rank holds, padding included: `align` or a multiple; all rows in a world of one.
pub(crate) fn chunk(k: usize, ranks: usize, align: usize) -> usize {
    if ranks == 1 { k } else { k.div_ceil(ranks).next_multiple_of(align) }
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
    gathers_ahead: AtomicU64,
    full_gathers: AtomicU64,
}

/// Gathers of a weight.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Gathers {
    /// Of FP8 codes.
    pub(crate) float8: u64,
    /// Those of them that were started before a GEMM asked for them.
    pub(crate) ahead: u64,
    /// In high precision.
    pub(crate) high_precision: u64,
}

impl Sharding {
    /// Shards of [`chunk`] rows.
    pub(crate) fn new(comm: Communicator, name: &str, logical: [usize; 2], align: usize, config: ShardConfig) -> Self {
        let chunk = chunk(logical[0], comm.world_size(), align);
        let zero = || AtomicU64::new(0);
        let (name, [float8_gathers, gathers_ahead, full_gathers]) = (name.into(), [zero(), zero(), zero()]);
        Self { comm, name, logical, chunk, config, float8_gathers, gathers_ahead, full_gathers }
    }

    /// K and N of the whole weight.
    pub(crate) fn logical(&self) -> [usize; 2] {
        self.logical
    }

    /// Between how many ranks it is divided.
    pub(crate) fn ranks(&self) -> usize {
        self.comm.world_size()
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

    /// Gathers so far.
    pub(crate) fn gathers(&self) -> Gathers {
        let [float8, ahead, high_precision] =
            [&self.float8_gathers, &self.gathers_ahead, &self.full_gathers].map(|count| count.load(Relaxed));
        Gathers { float8, ahead, high_precision }
    }

    /// Notes that a gather of FP8 codes was started before a GEMM asked for it.
    pub(crate) fn count_ahead(&self) {
        self.gathers_ahead.fetch_add(1, Relaxed);
    }

    /// Whether the weight is divided between several ranks, so that none has all of it.
    pub(crate) fn is_divided(&self) -> bool {
        self.ranks() > 1
    }

    /// Ends this rank's part in the job: operations of a backend return no errors.
    fn fail(&self, error: impl core::fmt::Display) -> ! {
        panic!("{}: {error}", self.name)
    }
}
