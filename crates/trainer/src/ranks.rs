//! [`Ranks`]: processes that train one model together. Each has separate micro-batches and its rows
//! of the parameters.

use std::collections::HashSet;

use burn::module::{AutodiffModule, Module, ModuleVisitor, Param, ParamId};
use burn::optim::GradientsParams;
use burn::tensor::Tensor;
use burn::tensor::backend::AutodiffBackend;
use burn_float8::Float8Stack;
use float8_shard::{Communicator, ShardError, Sharded};

use crate::batches::Batch;

/// Ranks of a sharded run.
#[derive(Clone, Debug)]
pub struct Ranks {
    sharded: Sharded,
    /// Sharded parameters.
    shards: HashSet<ParamId>,
}

impl Ranks {
    /// Ranks over which `model` is sharded.
    pub fn new<B: Float8Stack, M: Module<B>>(sharded: Sharded, model: &M) -> Self {
        struct Shards(HashSet<ParamId>);
        impl<B: Float8Stack> ModuleVisitor<B> for Shards {
            fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
                if Sharded::is_shard(&param.val()) {
                    self.0.insert(param.id);
                }
            }
        }
        let mut shards = Shards(HashSet::new());
        Module::<B>::visit(model, &mut shards);
        Self { sharded, shards: shards.0 }
    }

    /// Whether a parameter is sharded.
    pub(crate) fn has_shard(&self, parameter: ParamId) -> bool {
        self.shards.contains(&parameter)
    }

    fn comm(&self) -> &Communicator {
        self.sharded.communicator()
    }

    /// Number of ranks.
    pub fn count(&self) -> usize {
        self.comm().world_size()
    }

    /// Index of this rank, from 0.
    pub fn rank(&self) -> usize {
        self.comm().rank()
    }

    /// Whether this rank writes logs and metrics.
    pub fn is_first(&self) -> bool {
        self.rank() == 0
    }

    /// Whether this rank writes its shards: true for the ranks of the first replica.
    pub(crate) fn writes_shards(&self) -> bool {
        self.sharded.replica() == 0
    }

    /// Sums over all ranks.
    ///
    /// # Errors
    /// [`ShardError`].
    pub fn sum(&self, what: &str, own: Vec<f32>) -> Result<Vec<f32>, ShardError> {
        self.comm().all_reduce_sum(what, own)?.wait()
    }

    /// Sums over the ranks that divide one copy of the model.
    ///
    /// # Errors
    /// [`ShardError`].
    pub(crate) fn sum_of_shards(&self, what: &str, own: Vec<f32>) -> Result<Vec<f32>, ShardError> {
        self.sharded.shard_communicator().all_reduce_sum(what, own)?.wait()
    }

    /// Returns a signal to stop if any rank received one: signals reach the ranks at different
    /// steps.
    ///
    /// # Errors
    /// [`ShardError`].
    pub(crate) fn stop(&self, own: Option<&'static str>) -> Result<Option<&'static str>, ShardError> {
        const NAMES: [&str; 4] = ["SIGTERM", "SIGHUP", "SIGINT", "SIGUSR1"];
        let number = |own| 1 + NAMES.iter().position(|name| *name == own).unwrap_or(0) as u32;
        let told = self.comm().all_reduce_max_bits("signals", vec![own.map_or(0, number)])?.wait()?;
        Ok(own.or_else(|| NAMES.get((told[0] as usize).checked_sub(1)?).copied()))
    }

    /// Indices of this rank's micro-batches of a step, in order, each with a factor for its loss.
    ///
    /// Micro-batch `i` belongs to rank `i` modulo the number of ranks. All ranks run the same
    /// number, because each takes part in collectives. A micro-batch without targets is replaced by
    /// another of the same round with factor zero. A round without any targets is skipped by all.
    pub(crate) fn share(&self, batches: &[Batch]) -> Vec<(usize, f64)> {
        let has_targets = |index: &usize| batches.get(*index).is_some_and(|batch| batch.num_targets() > 0);
        let round = |first: usize| {
            let own = Some(first + self.rank()).filter(has_targets).map(|index| (index, 1.0));
            own.or_else(|| Some(((first..first + self.count()).find(has_targets)?, 0.0)))
        };
        (0..batches.len()).step_by(self.count()).filter_map(round).collect()
    }

    /// Called before a step: one all-reduce for the scales of all weights.
    pub(crate) fn begin_step<B: AutodiffBackend + Float8Stack, M: AutodiffModule<B>>(&self, model: &M) {
        self.sharded.precompute_scales::<B, M>(model);
    }

    /// Whether backward reduces the gradients of shards, or accumulates them on this rank.
    pub(crate) fn set_requires_gradient_sync(&self, requires_gradient_sync: bool) {
        self.sharded.set_requires_gradient_sync(requires_gradient_sync);
    }

    /// Called after each backward: waits for the gradients of shards.
    ///
    /// # Errors
    /// [`ShardError`].
    pub(crate) fn wait_for_gradients<B: AutodiffBackend + Float8Stack, M: AutodiffModule<B>>(
        &self,
        model: &M,
        grads: &mut GradientsParams,
    ) -> Result<(), ShardError> {
        self.sharded.wait_for_gradients::<B, M>(model, grads)
    }

    /// Called after backward: reduces the gradients of replicated parameters.
    ///
    /// # Errors
    /// [`ShardError`].
    pub(crate) fn reduce_gradients<B: AutodiffBackend + Float8Stack, M: AutodiffModule<B>>(
        &self,
        model: &M,
        grads: &mut GradientsParams,
    ) -> Result<(), ShardError> {
        self.sharded.reduce_gradients::<B, M>(model, grads)
    }
}
