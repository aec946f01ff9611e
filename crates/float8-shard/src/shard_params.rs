//! Replaces parameters by this rank's rows.
use std::sync::Arc;

use burn::module::Module;
use burn_backend::TensorMetadata;
use burn_backend::tensor::FloatTensor;
use burn_float8::config::Policy;
use burn_float8::report::Layer;
use burn_float8::shard_hooks::{self, Change, NamedParam, map_params};
use burn_float8::{Float8Config, Float8Stack, Float8Tensor};
use serde::Serialize;

use crate::config::ShardConfig;
use crate::sharding::{Sharding, alignment};
use crate::world::World;

/// Result of [`Sharded::apply`](crate::Sharded::apply). `Display` prints one line.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct ShardSummary {
    /// Number of ranks that divide one copy of the model.
    pub ranks: usize,
    /// Number of copies.
    pub replicas: usize,
    /// Number of sharded parameters.
    pub sharded: usize,
    /// Number of replicated parameters.
    pub replicated: usize,
    /// Elements of the model.
    pub elements: u64,
    /// Elements on each rank, padding included.
    pub elements_per_rank: u64,
    /// Padding elements over the ranks of a copy.
    pub padding: u64,
}

impl core::fmt::Display for ShardSummary {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        let Self { ranks, replicas, sharded, replicated, elements, elements_per_rank, padding } = self;
        let of_replicas = if *replicas > 1 { format!(" in each of {replicas} replicas") } else { String::new() };
        write!(
            f,
            "Sharded over {ranks} ranks{of_replicas}: {sharded} parameters, {replicated} replicated; {elements_per_rank} of {elements} elements a \
             rank, {padding} of padding in a copy"
        )
    }
}

/// Model with this rank's rows, and what was done to it.
pub(crate) struct Divided<M> {
    pub(crate) model: M,
    pub(crate) summary: ShardSummary,
    /// Layers of the linears in FP8.
    pub(crate) layers: Vec<Arc<Layer>>,
}

/// Replaces sharded parameters by this rank's rows. `like` is a layer of the model's conversion,
/// which is used for parameters without a layer.
pub(crate) fn divide<B: Float8Stack, M: Module<B>>(
    model: M,
    world: &Arc<World<B::Inner>>,
    config: ShardConfig,
    mut like: Option<Arc<Layer>>,
) -> Divided<M> {
    let (ranks, replicas) = (world.shard.size(), world.replicate.size());
    let mut summary = ShardSummary { ranks, replicas, ..ShardSummary::default() };
    let mut layers = vec![];
    let model = map_params::<B, M>(model, |param| {
        let elements = param.shape.num_elements() as u64;
        summary.elements += elements;
        let Some(layer) = layer_of(param, &mut like, config.experts && ranks > 1) else {
            summary.replicated += 1;
            summary.elements_per_rank += elements;
            return Change::None;
        };
        let policy = shard_hooks::configured(&layer);
        let sharding = match param.shape[..] {
            [k, n] => Sharding::new(world.clone(), layer.name(), [k, n], alignment(Some(&policy)), config),
            _ => Sharding::of_experts(world.clone(), layer.name(), &param.shape, config),
        };
        let sharding = Arc::new(Sharding { part: shard_hooks::parallel(&layer), ..sharding });
        summary.sharded += 1;
        let own = sharding.own_shape().iter().product::<usize>() as u64;
        summary.elements_per_rank += own;
        summary.padding += own * summary.ranks as u64 - elements;
        let layer = match sharding.has_experts() {
            true => shard_hooks::with_experts::<B::Inner>(&layer, sharding.clone()),
            false => shard_hooks::with_source::<B::Inner>(&layer, sharding.clone()),
        };
        if matches!(*policy, Policy::Float8(_)) {
            layers.push(layer.clone());
        }
        Change::map(move |t| shard::<B>(t, &layer, &sharding))
    });
    Divided { model, summary, layers }
}

/// Layer of a parameter, existing or new. None if the parameter is replicated.
fn layer_of<B: Float8Stack>(
    param: &NamedParam<'_, B>,
    like: &mut Option<Arc<Layer>>,
    divides_experts: bool,
) -> Option<Arc<Layer>> {
    match param.shape[..] {
        [_, _] => {}
        [experts, _, _] if divides_experts && experts > 1 => {}
        _ => return None,
    }
    let known = param.float().and_then(|weight| B::layer(&weight));
    known.or_else(|| {
        let default = Float8Config::default();
        let config = like.as_deref().map_or(&default, shard_hooks::config);
        let name = param.linear_weight(config).or(param.path.embedding(2))?;
        let new = shard_hooks::in_high_precision(name, like.as_deref());
        like.get_or_insert_with(|| new.clone());
        Some(new)
    })
}

/// Takes this rank's rows of a weight, which may be whole or already those rows.
///
/// Panics, as Burn does, for any other shape, such as from a record of another model or number of
/// ranks.
fn shard<B: Float8Stack>(weight: FloatTensor<B>, layer: &Arc<Layer>, sharding: &Sharding<B::Inner>) -> FloatTensor<B> {
    B::map_float8(weight, |weight| {
        let (shape, whole) = (weight.shape().to_vec(), &sharding.whole);
        let own = [&[sharding.chunk], &whole[1..]].concat();
        let is_whole = shape == *whole;
        if !is_whole && shape != own {
            let (name, ranks) = (layer.name(), sharding.ranks());
            panic!(
                "{name}: {shape:?} was loaded, where the whole is {whole:?} and the rows of each of {ranks} ranks {own:?}"
            );
        }
        let codes = || shard_hooks::part_of_codes(layer, &weight, sharding.rows(), 0..shape[1], sharding.chunk);
        let rows = match is_whole {
            true => codes().unwrap_or_else(|| {
                let rows = sharding.shard_of(sharding.matrix(weight.into_full()));
                Float8Tensor::new(sharding.in_shape(rows))
            }),
            false => weight,
        };
        shard_hooks::weight_of::<B::Inner>(layer.clone(), rows)
    })
}
