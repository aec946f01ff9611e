//! Weights of which each rank keeps some rows (FSDP, ZeRO-3): what is gathered before a GEMM, and how gradients come back.
//!
//! ```text
//! rank r of R holds rows [r·chunk, (r + 1)·chunk) of w [K, N], zeros beyond K        chunk = ⌈⌈K / R⌉ / align⌉ · align
//! fprop, dgrad   cast own rows → all-gather codes and scales → GEMM
//! wgrad          GEMM → reduce-scatter dw: each rank gets the sum of its rows over all ranks
//! ```
//!
//! The parameter is the shard, so that optimizers which look at one element at a time work on it unchanged.
use std::ops::Range;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex};

use burn::tensor::{Tensor, TensorPrimitive};
use burn_backend::tensor::FloatTensor;
use burn_float8::backend::Float8Backend;
use burn_float8::config::Policy;
use burn_float8::report::Layer;
use burn_float8::{Float8Stack, seam};

use crate::config::ShardConfig;
use crate::world::World;

/// Rows of a shard are a multiple of what one scale covers.
const BLOCK: usize = 128;

/// Rows of a shard where no block of scales asks for more: codes then come in whole words, and rows of the transpose in 16 bytes.
const ALIGN: usize = 16;

/// What the rows of a shard are a multiple of, as its linear is configured, if it is one.
pub(crate) fn alignment(policy: Option<&Policy>) -> usize {
    use float8_kernels::Granularity::{Block1x32, Block1x128, Block128x128};
    let granularities = policy.map(seam::weight_granularities).into_iter().flatten().flatten();
    let is_block = |granularity| matches!(granularity, Block1x32 | Block1x128 | Block128x128);
    if granularities.into_iter().any(is_block) { BLOCK } else { ALIGN }
}

/// Rows of K that each rank holds, padding included: `align` or a multiple; all rows in a world of one.
pub(crate) fn chunk(k: usize, ranks: usize, align: usize) -> usize {
    if ranks == 1 { k } else { k.div_ceil(ranks).next_multiple_of(align) }
}

/// Which rows of one weight `[K, N]` this rank holds, and what it has moved.
pub(crate) struct Sharding<B: Float8Backend> {
    pub(crate) world: Arc<World<B>>,
    pub(crate) name: String,
    /// K and N.
    pub(crate) logical: [usize; 2],
    pub(crate) chunk: usize,
    pub(crate) config: ShardConfig,
    pub(crate) float8_gathers: AtomicU64,
    /// Gathers of FP8 codes that were started before a GEMM asked for them.
    pub(crate) gathers_ahead: AtomicU64,
    pub(crate) full_gathers: AtomicU64,
    /// The sum in f32 of this rank's gradients `[K, N]` that are kept back until gradients are exchanged again.
    pub(crate) unsynced: Mutex<Option<FloatTensor<B>>>,
}

impl<B: Float8Backend> Sharding<B> {
    /// Shards of [`chunk`] rows.
    pub(crate) fn new(
        world: Arc<World<B>>,
        name: &str,
        logical: [usize; 2],
        align: usize,
        config: ShardConfig,
    ) -> Self {
        let chunk = chunk(logical[0], world.comm.world_size(), align);
        let zero = || AtomicU64::new(0);
        let (name, [float8_gathers, gathers_ahead, full_gathers]) = (name.into(), [zero(), zero(), zero()]);
        let unsynced = Mutex::new(None);
        Self { world, name, logical, chunk, config, float8_gathers, gathers_ahead, full_gathers, unsynced }
    }

    /// How the weight of a layer is sharded, if it is.
    pub(crate) fn of(layer: &Layer) -> Option<Arc<Self>> {
        seam::source::<B>(layer)?.as_any().downcast().ok()
    }

    /// How a parameter is sharded, if it is.
    pub(crate) fn of_parameter<S: Float8Stack<Inner = B>, const D: usize>(
        parameter: &Tensor<S, D>,
    ) -> Option<Arc<Self>> {
        match parameter.clone().into_primitive() {
            TensorPrimitive::Float(t) => Self::of(&*S::layer(&t)?),
            TensorPrimitive::QFloat(_) => None,
        }
    }

    /// Between how many ranks it is divided.
    pub(crate) fn ranks(&self) -> usize {
        self.world.comm.world_size()
    }

    /// The shape of a shard, padding included.
    pub(crate) fn own_shape(&self) -> [usize; 2] {
        [self.chunk, self.logical[1]]
    }

    /// The rows of the whole weight that this rank holds: as many as the chunk, or fewer at the end.
    pub(crate) fn rows(&self) -> Range<usize> {
        let at = |rank: usize| (rank * self.chunk).min(self.logical[0]);
        at(self.world.comm.rank())..at(self.world.comm.rank() + 1)
    }

    /// Ends this rank's part in the job: operations of a backend return no errors.
    pub(crate) fn fail(&self, error: impl core::fmt::Display) -> ! {
        panic!("{}: {error}", self.name)
    }
}
