//! [`Ranks`]: processes that train one model together. Each has its rows of the parameters and separate
//! micro-batches, which the ranks of tensor parallelism share.

use std::collections::HashMap;

use burn::module::{AutodiffModule, Module, ParamId};
use burn::optim::GradientsParams;
use burn::tensor::backend::AutodiffBackend;
use burn_float8::Float8Stack;
use burn_float8::shard_hooks::visit_params;
use float8_shard::{Communicator, ShardError, Sharded, ShardedParameter, TensorParallel};

use crate::batches::Batch;

/// Ranks of a sharded run.
#[derive(Clone, Debug)]
pub struct Ranks {
    sharded: Sharded,
    parallel: Option<TensorParallel>,
    parameters: HashMap<ParamId, ShardedParameter>,
}

impl Ranks {
    /// Ranks over which `model` is sharded, after `parallel` has divided its linears.
    pub fn new<B: Float8Stack, M: Module<B>>(sharded: Sharded, parallel: Option<TensorParallel>, model: &M) -> Self {
        let mut ids = vec![];
        visit_params::<B, M>(model, |param| ids.push(param.id));
        let parameters = ids.into_iter().zip(Sharded::parameters::<B, M>(model)).collect();
        Self { sharded, parallel, parameters }
    }

    /// Place of this rank's elements in a whole parameter.
    pub(crate) fn parameter(&self, parameter: ParamId) -> Option<&ShardedParameter> {
        self.parameters.get(&parameter)
    }

    /// Whether the ranks of a copy of the model have different elements of a parameter.
    pub(crate) fn is_divided(&self, parameter: ParamId) -> bool {
        self.parameter(parameter).is_some_and(|parameter| parameter.is_shard || parameter.is_part)
    }

    /// Whether this rank is the first of its copy of the model that has its elements of a parameter.
    pub(crate) fn is_first_with(&self, parameter: ParamId) -> bool {
        let (is_shard, is_part) =
            self.parameter(parameter).map_or((false, false), |parameter| (parameter.is_shard, parameter.is_part));
        (is_shard || self.sharded.shard_communicator().rank() == 0)
            && (is_part || self.rank().is_multiple_of(self.tensor()))
    }

    /// Number of ranks that divide each linear and read the same batches.
    pub(crate) fn tensor(&self) -> usize {
        self.sharded.copy_communicator().world_size() / self.sharded.shard_communicator().world_size()
    }

    fn data(&self) -> &Communicator {
        self.sharded.data_communicator()
    }

    /// Number of ranks with batches of their own.
    pub(crate) fn readers(&self) -> usize {
        self.data().world_size()
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

    /// Whether this rank saves its elements of a parameter: the first rank that has them.
    pub(crate) fn saves(&self, parameter: ParamId) -> bool {
        self.sharded.replica() == 0 && self.is_first_with(parameter)
    }

    /// Sums over the ranks with batches of their own.
    ///
    /// # Errors
    /// [`ShardError`].
    pub fn sum(&self, what: &str, own: Vec<f32>) -> Result<Vec<f32>, ShardError> {
        self.data().all_reduce_sum(what, own)?.wait()
    }

    /// Sums over the ranks that divide one copy of the model.
    ///
    /// # Errors
    /// [`ShardError`].
    pub(crate) fn sum_of_copy(&self, what: &str, own: Vec<f32>) -> Result<Vec<f32>, ShardError> {
        self.sharded.copy_communicator().all_reduce_sum(what, own)?.wait()
    }

    /// Returns a signal to stop if any rank received one: signals reach the ranks at different
    /// steps.
    ///
    /// # Errors
    /// [`ShardError`].
    pub(crate) fn stop(&self, own: Option<&'static str>) -> Result<Option<&'static str>, ShardError> {
        let told = self.comm().all_reduce_max_bits("signals", vec![u32::from(own.is_some())])?.wait()?;
        // The launcher forwards SIGTERM.
        Ok(own.or((told[0] > 0).then_some("SIGTERM")))
    }

    /// Indices of this rank's micro-batches of a step, in order, each with a factor for its loss.
    ///
    /// Micro-batch `i` belongs to [reader](Self::readers) `i` modulo their number. All ranks run the same
    /// number, because each takes part in collectives. A micro-batch without targets is replaced by
    /// another of the same round with factor zero. A round without any targets is skipped by all.
    pub(crate) fn share(&self, batches: &[Batch]) -> Vec<(usize, f64)> {
        let has_targets = |index: &usize| batches.get(*index).is_some_and(|batch| batch.num_targets() > 0);
        let round = |first: usize| {
            let own = Some(first + self.data().rank()).filter(has_targets).map(|index| (index, 1.0));
            own.or_else(|| Some(((first..first + self.readers()).find(has_targets)?, 0.0)))
        };
        (0..batches.len()).step_by(self.readers()).filter_map(round).collect()
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
        self.sharded.reduce_gradients::<B, M>(model, grads)?;
        self.parallel.as_ref().map_or(Ok(()), |parallel| parallel.reduce_gradients::<B, M>(model, grads))
    }
}
