//! [`Ranks`]: processes that train one model together. Each has its rows of the parameters and separate
//! micro-batches, which the ranks of tensor parallelism share.

use std::collections::HashMap;

use burn::module::{AutodiffModule, Module, ParamId};
use burn::optim::GradientsParams;
use burn::tensor::backend::AutodiffBackend;
use burn_float8::Float8Stack;
use burn_float8::shard_hooks::visit_params;
use float8_shard::{Communicator, Place, ShardError, Sharded, TensorParallel};

use crate::batches::Batch;

/// Ranks of a sharded run.
#[derive(Clone, Debug)]
pub struct Ranks {
    sharded: Sharded,
    parallel: Option<TensorParallel>,
    parameters: HashMap<ParamId, Place>,
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
    pub(crate) fn parameter(&self, parameter: ParamId) -> Option<&Place> {
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
        const NAMES: [&str; 4] = ["SIGTERM", "SIGHUP", "SIGINT", "SIGUSR1"];
        let number = |own| 1 + NAMES.iter().position(|name| *name == own).unwrap_or(0) as u32;
        let told = self.comm().all_reduce_max_bits("signals", vec![own.map_or(0, number)])?.wait()?;
        Ok(own.or_else(|| NAMES.get((told[0] as usize).checked_sub(1)?).copied()))
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

#[cfg(test)]
mod tests {
    use burn::backend::{Autodiff, Flex};
    use burn::nn::{Linear, LinearConfig};
    use burn::tensor::{Int, Tensor};
    use burn_float8::Float8;
    use float8_shard::ShardConfig;

    use super::*;
    use crate::config::{OptimizerSection, StorageDtype};
    use crate::optimizer::{AT_ONCE, AdamWStates, ModelSlot, Update};

    type B = Float8<Autodiff<Flex>>;

    /// First moments in bf16 of a linear's columns, after a step.
    fn moments(columns: std::ops::Range<usize>) -> (Tensor<Float8<Flex>, 2>, Tensor<Float8<Flex>, 1>) {
        let (device, solo, all) = (Default::default(), Communicator::solo(), 64);
        let model: Linear<B> = LinearConfig::new(8, columns.len()).init(&device);
        let ids = [model.weight.id, model.bias.as_ref().unwrap().id];
        let (model, sharded) = Sharded::apply::<B, _>(model, &solo, ShardConfig::default()).unwrap();
        let own = Some([columns.start, columns.end]);
        let places = [
            Place { cols: own, ..Place::whole("weight", [8, all]) },
            Place { rows: own, ..Place::whole("bias", [all]) },
        ];
        let ranks = Ranks { sharded, parallel: None, parameters: ids.into_iter().zip(places).collect() };
        let section = OptimizerSection { state_dtype: StorageDtype::Bf16, ..OptimizerSection::default() };
        let update = Update { section: &section, lr: 1e-4, seed: 5, step: 0, at_once: AT_ONCE };
        let mut grads = GradientsParams::new();
        let grad = |elements: usize| Tensor::<Float8<Flex>, 1, Int>::arange(0..elements as i64, &device).float() * 1e-3;
        grads.register(ids[0], grad(8 * all).reshape([8, all]).slice([0..8, columns.clone()]));
        grads.register(ids[1], grad(all).slice([columns]));
        let (mut states, mut slot) = (AdamWStates::default(), ModelSlot::new(model));
        update.apply::<B, _>(&mut states, &mut slot, grads, Some(&ranks));
        let ([weight, _], [bias, _]) = (states.get(ids[0]).unwrap().moments, states.get(ids[1]).unwrap().moments);
        (weight, bias)
    }

    /// Random bits follow the positions in the whole parameters, also of a bias.
    #[test]
    fn a_part_is_rounded_as_in_the_whole() {
        let ((weight, bias), (own_weight, own_bias)) = (moments(0..64), moments(32..64));
        assert_eq!(own_weight.into_data(), weight.narrow(1, 32, 32).into_data());
        assert_eq!(own_bias.into_data(), bias.narrow(0, 32, 32).into_data());
    }
}
