//! [`Sharder`]: replaces parameters by this rank's rows.
use std::sync::Arc;

use burn::module::{ModuleMapper, Param};
use burn::tensor::{Tensor, TensorPrimitive};
use burn_backend::TensorMetadata;
use burn_backend::tensor::FloatTensor;
use burn_float8::config::Policy;
use burn_float8::report::Layer;
use burn_float8::shard_hooks::{self, Path, map_param};
use burn_float8::{Float8Config, Float8Stack};
use serde::Serialize;

use crate::config::ShardConfig;
use crate::error::ShardError;
use crate::sharding::{Sharding, alignment};
use crate::world::World;

/// Result of [`Sharded::apply`](crate::Sharded::apply). `Display` prints one line.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct ShardSummary {
    /// Number of ranks.
    pub ranks: usize,
    /// Number of sharded parameters.
    pub sharded: usize,
    /// Number of replicated parameters.
    pub replicated: usize,
    /// Elements of the model.
    pub elements: u64,
    /// Elements on each rank, padding included.
    pub elements_per_rank: u64,
    /// Padding elements over all ranks.
    pub padding: u64,
}

impl core::fmt::Display for ShardSummary {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        let Self { ranks, sharded, replicated, elements, elements_per_rank, padding } = self;
        write!(
            f,
            "Sharded over {ranks} ranks: {sharded} parameters, {replicated} replicated; {elements_per_rank} of {elements} elements a \
             rank, {padding} of padding in all"
        )
    }
}

/// Replaces sharded parameters by this rank's rows.
pub(crate) struct Sharder<B: Float8Stack> {
    path: Path,
    world: Arc<World<B::Inner>>,
    config: ShardConfig,
    /// Layer whose conversion is used for parameters without a layer.
    like: Option<Arc<Layer>>,
    summary: ShardSummary,
    /// Layers of the linears in FP8.
    layers: Vec<Arc<Layer>>,
}

impl<B: Float8Stack> Sharder<B> {
    /// Creates a sharder; `like` is a layer of the model's conversion, if any.
    pub(crate) fn new(world: Arc<World<B::Inner>>, config: ShardConfig, like: Option<Arc<Layer>>) -> Self {
        let summary = ShardSummary { ranks: world.comm.world_size(), ..ShardSummary::default() };
        Self { path: Path::default(), world, config, like, summary, layers: vec![] }
    }

    /// Summary, and the layers of the sharded linears in FP8.
    pub(crate) fn finish(self) -> (ShardSummary, Vec<Arc<Layer>>) {
        (self.summary, self.layers)
    }

    /// Layer of a parameter, existing or new. None if the parameter is replicated.
    fn layer<const D: usize>(&mut self, tensor: Tensor<B, D>) -> Option<Arc<Layer>> {
        if D != 2 {
            return None;
        }
        let known = match tensor.into_primitive() {
            TensorPrimitive::Float(weight) => B::layer(&weight),
            TensorPrimitive::QFloat(_) => None,
        };
        let default = Float8Config::default();
        known.or_else(|| {
            let config = self.like.as_deref().map_or(&default, shard_hooks::config);
            let name = self.path.linear_weight(D, config).or(self.path.embedding(D))?;
            let new = shard_hooks::in_high_precision(name, self.like.as_deref());
            self.like.get_or_insert_with(|| new.clone());
            Some(new)
        })
    }
}

impl<B: Float8Stack> ModuleMapper<B> for Sharder<B> {
    fn enter_module(&mut self, name: &str, container: &str) {
        self.path.enter(name, container);
    }

    fn exit_module(&mut self, _: &str, _: &str) {
        self.path.exit();
    }

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<B, D>>) -> Param<Tensor<B, D>> {
        let tensor = param.val();
        let dims = tensor.dims();
        let elements = dims.iter().product::<usize>() as u64;
        self.summary.elements += elements;
        let Some(layer) = self.layer(tensor) else {
            self.summary.replicated += 1;
            self.summary.elements_per_rank += elements;
            return param;
        };
        let policy = shard_hooks::configured(&layer);
        let sharding =
            Sharding::new(self.world.clone(), layer.name(), [dims[0], dims[1]], alignment(Some(&policy)), self.config);
        let (sharding, summary) = (Arc::new(sharding), &mut self.summary);
        summary.sharded += 1;
        let own = sharding.own_shape().iter().product::<usize>() as u64;
        summary.elements_per_rank += own;
        summary.padding += own * summary.ranks as u64 - elements;
        let layer = shard_hooks::with_source::<B::Inner>(&layer, sharding.clone());
        if matches!(*policy, Policy::Float8(_)) {
            self.layers.push(layer.clone());
        }
        map_param(param, move |t| shard::<B>(t, &layer, &sharding))
    }
}

/// Takes this rank's rows of a weight, which may be whole or already those rows.
///
/// Panics, as Burn does, for any other shape, such as from a record of another model or number of
/// ranks.
fn shard<B: Float8Stack>(weight: FloatTensor<B>, layer: &Arc<Layer>, sharding: &Sharding<B::Inner>) -> FloatTensor<B> {
    B::map_float8(weight, |weight| {
        let (shape, whole, rows) = (weight.shape().to_vec(), sharding.logical, sharding.own_shape());
        let is_whole = shape == whole;
        if !is_whole && shape != rows {
            let name = layer.name().into();
            panic!("{}", ShardError::Shape { name, got: shape, whole, rows, ranks: sharding.ranks() });
        }
        let rows = if is_whole { sharding.shard_of(weight.into_full()) } else { weight.into_full() };
        shard_hooks::weight_of::<B::Inner>(layer.clone(), rows)
    })
}
