//! Sharded weights (FSDP, ZeRO-3): gathers before GEMMs, and reduction of gradients.
//!
//! ```text
//! rank r of R holds rows [r·chunk, (r + 1)·chunk) of w [K, N], zeros beyond K        chunk = ⌈⌈K / R⌉ / align⌉ · align
//! fprop, dgrad   cast own rows → all-gather codes and scales → GEMM
//! wgrad          GEMM → reduce-scatter dw: each rank gets the sum of its rows over all ranks
//! ```
//!
//! The parameter is the shard, so element-wise optimizers work on it unchanged.
use std::any::Any;
use std::ops::Range;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex};

use burn_backend::tensor::FloatTensor;
use burn_float8::backend::Float8Backend;
use burn_float8::config::Policy;
use burn_float8::report::Layer;
use burn_float8::shard_hooks::ParallelHooks;
use burn_float8::{Float8Stack, shard_hooks};
use float8_kernels::Granularity;

use crate::config::ShardConfig;
use crate::world::World;

/// Shards have a multiple of this number of rows if scales cover blocks.
pub(crate) const BLOCK: usize = 128;

/// Shards have a multiple of this number of rows otherwise. Codes then fill whole words, and rows
/// of the transpose are multiples of 16 bytes.
const ALIGN: usize = 16;

/// Alignment of a shard's rows under its linear's policy, if it is a linear.
pub(crate) fn alignment(policy: Option<&Policy>) -> usize {
    let granularities = policy.map(shard_hooks::weight_granularities).into_iter().flatten().flatten();
    granularities.map(alignment_of).max().unwrap_or(ALIGN)
}

/// Alignment of a part of a tensor with these scales.
pub(crate) fn alignment_of(granularity: Granularity) -> usize {
    match granularity {
        Granularity::Block1x32 | Granularity::Block1x128 | Granularity::Block128x128 => BLOCK,
        Granularity::Tensor | Granularity::Row => ALIGN,
    }
}

/// Rows of K on each rank, padding included: a multiple of `align`; in a world of one, all rows.
pub(crate) fn chunk(k: usize, ranks: usize, align: usize) -> usize {
    if ranks == 1 { k } else { k.div_ceil(ranks).next_multiple_of(align) }
}

/// Partition of one weight `[K, N]`, with counts of its gathers. Of a tensor-parallel part it is the
/// partition of the part.
pub(crate) struct Sharding<B: Float8Backend> {
    pub(crate) world: Arc<World<B>>,
    pub(crate) name: String,
    /// Shape of the whole weight, or of the part.
    pub(crate) whole: Vec<usize>,
    /// K and N; of experts `[G, K, N]`, G and K · N.
    pub(crate) logical: [usize; 2],
    /// Part of the weight by tensor parallelism.
    pub(crate) part: Option<Arc<dyn ParallelHooks<B>>>,
    pub(crate) chunk: usize,
    pub(crate) config: ShardConfig,
    pub(crate) float8_gathers: AtomicU64,
    /// Gathers of FP8 codes that were started before a GEMM needed them.
    pub(crate) gathers_ahead: AtomicU64,
    pub(crate) full_gathers: AtomicU64,
    /// Accumulated f32 gradient `[K, N]` of this rank that has not been exchanged.
    pub(crate) unsynced: Mutex<Option<FloatTensor<B>>>,
}

impl<B: Float8Backend> Sharding<B> {
    /// Creates shards of [`chunk`] rows.
    pub(crate) fn new(
        world: Arc<World<B>>,
        name: &str,
        logical: [usize; 2],
        align: usize,
        config: ShardConfig,
    ) -> Self {
        let chunk = chunk(logical[0], world.shard.size(), align);
        let zero = || AtomicU64::new(0);
        let (name, [float8_gathers, gathers_ahead, full_gathers]) = (name.into(), [zero(), zero(), zero()]);
        let unsynced = Mutex::new(None);
        Self {
            world,
            name,
            whole: logical.to_vec(),
            logical,
            part: None,
            chunk,
            config,
            float8_gathers,
            gathers_ahead,
            full_gathers,
            unsynced,
        }
    }

    /// Partition of a layer's weight, if it is sharded.
    pub(crate) fn of(layer: &Layer) -> Option<Arc<Self>> {
        let hooks: Arc<dyn Any + Send + Sync> = match shard_hooks::source::<B>(layer) {
            Some(source) => source,
            None => shard_hooks::experts::<B>(layer)?,
        };
        hooks.downcast().ok()
    }

    /// Whether the weight is divided among ranks.
    pub(crate) fn is_divided(&self) -> bool {
        self.ranks() > 1
    }

    /// Partition of a parameter's value, if it is sharded.
    pub(crate) fn of_value<S: Float8Stack<Inner = B>>(value: &FloatTensor<S>) -> Option<Arc<Self>> {
        Self::of(&*S::layer(value)?)
    }

    /// Number of ranks that divide the weight.
    pub(crate) fn ranks(&self) -> usize {
        self.world.shard.size()
    }

    /// Shape of a shard, padding included.
    pub(crate) fn own_shape(&self) -> [usize; 2] {
        [self.chunk, self.logical[1]]
    }

    /// Rows of the whole weight on this rank: a whole chunk, or fewer at the end.
    pub(crate) fn rows(&self) -> Range<usize> {
        let at = |rank: usize| (rank * self.chunk).min(self.logical[0]);
        let rank = self.world.shard.comm.rank();
        at(rank)..at(rank + 1)
    }

    /// Panics with the weight's name: backend operations cannot return errors.
    pub(crate) fn fail(&self, error: impl core::fmt::Display) -> ! {
        panic!("{}: {error}", self.name)
    }
}
