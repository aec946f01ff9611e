//! [`Sharder`]: of each parameter the rows that a rank keeps, or all of it.
use std::sync::Arc;

use burn::module::{ModuleMapper, Param};
use burn::tensor::{Tensor, TensorPrimitive};
use burn_backend::TensorMetadata;
use burn_backend::tensor::FloatTensor;
use burn_float8::config::Policy;
use burn_float8::report::Layer;
use burn_float8::seam::{self, Path, map_param};
use burn_float8::{Float8Config, Float8Stack};
use serde::Serialize;

use crate::config::ShardConfig;
use crate::error::ShardError;
use crate::sharding::{Sharding, alignment};
use crate::world::World;

/// What [`Sharded::apply`](crate::Sharded::apply) did; its `Display` is a line.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct ShardSummary {
    /// Ranks.
    pub ranks: usize,
    /// Parameters of which each rank keeps its rows.
    pub sharded: usize,
    /// Parameters that each rank keeps whole.
    pub replicated: usize,
    /// Elements of the model.
    pub elements: u64,
    /// Elements that each rank keeps, padding included.
    pub elements_per_rank: u64,
    /// Elements that are padding, on all ranks together.
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

/// Replaces the parameters that are sharded by this rank's rows.
pub(crate) struct Sharder<B: Float8Stack> {
    path: Path,
    world: Arc<World<B::Inner>>,
    config: ShardConfig,
    /// A layer of the conversion that parameters without one get.
    like: Option<Arc<Layer>>,
    summary: ShardSummary,
    /// The layers of the linears in FP8.
    layers: Vec<Arc<Layer>>,
}

impl<B: Float8Stack> Sharder<B> {
    /// For a model whose linears have the conversion of `like`, if any has one.
    pub(crate) fn new(world: Arc<World<B::Inner>>, config: ShardConfig, like: Option<Arc<Layer>>) -> Self {
        let summary = ShardSummary { ranks: world.comm.world_size(), ..ShardSummary::default() };
        Self { path: Path::default(), world, config, like, summary, layers: vec![] }
    }

    /// What was done, and the layers of the linears in FP8 that are sharded now.
    pub(crate) fn finish(self) -> (ShardSummary, Vec<Arc<Layer>>) {
        (self.summary, self.layers)
    }

    /// The layer of a parameter as it was, or a new one: none if every rank keeps the parameter.
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
            let config = self.like.as_deref().map_or(&default, seam::config);
            let name = self.path.linear_weight(D, config).or(self.path.embedding(D))?;
            let new = seam::in_high_precision(name, self.like.as_deref());
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
        let policy = seam::configured(&layer);
        let sharding =
            Sharding::new(self.world.clone(), layer.name(), [dims[0], dims[1]], alignment(Some(&policy)), self.config);
        let (sharding, summary) = (Arc::new(sharding), &mut self.summary);
        summary.sharded += 1;
        let own = sharding.own_shape().iter().product::<usize>() as u64;
        summary.elements_per_rank += own;
        summary.padding += own * summary.ranks as u64 - elements;
        let layer = seam::with_source::<B::Inner>(&layer, sharding.clone());
        if matches!(*policy, Policy::Float8(_)) {
            self.layers.push(layer.clone());
        }
        map_param(param, move |t| shard::<B>(t, &layer, &sharding))
    }
}

/// This rank's rows of a weight, which may be whole or those rows; anything else, as from a record of another model or of another
/// number of ranks, is a panic, as it is in Burn.
fn shard<B: Float8Stack>(weight: FloatTensor<B>, layer: &Arc<Layer>, sharding: &Sharding<B::Inner>) -> FloatTensor<B> {
    B::map_float8(weight, |weight| {
        let (shape, whole, rows) = (weight.shape().to_vec(), sharding.logical, sharding.own_shape());
        let is_whole = shape == whole;
        if !is_whole && shape != rows {
            let name = layer.name().into();
            panic!("{}", ShardError::Shape { name, got: shape, whole, rows, ranks: sharding.ranks() });
        }
        let rows = if is_whole { sharding.shard_of(weight.into_full()) } else { weight.into_full() };
        seam::weight_of::<B::Inner>(layer.clone(), rows)
    })
}
