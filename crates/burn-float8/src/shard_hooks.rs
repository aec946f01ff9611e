//! Hooks for the crate float8-shard: sharded weights, and optimizer steps shared by several
//! processes. Not part of the public API.
use std::sync::Arc;

use burn::module::Module;
use burn_backend::Backend;
use burn_backend::tensor::{Device, FloatTensor};

use crate::backend::Float8Backend;
#[cfg(feature = "cubecl")]
pub use crate::backend::{fusion::resolved, operand::scales};
pub use crate::backend::{host::read_f32, in_dtype};
use crate::config::{Float8Config, Granularity, LinearInfo, Policy, matches};
use crate::error::Float8Error;
use crate::layer::{Layer, Tag};
pub use crate::model::walk::{Change, FoundLinear, NamedParam, Path, linears, map_param, map_params, visit_params};
pub use crate::model::{part_of_codes, weight_of_codes};
use crate::ops::functions::find;
pub use crate::ops::matrix;
pub use crate::profile::operation;
use crate::stack::Float8Stack;
pub use crate::step::PeerExchange;
use crate::step::{DeviceState, Peers};
pub use crate::tensor::{
    Axis, CastAmax, Exchange, ExpertHooks, ExpertLayout, LinearPart, ParallelHooks, ParallelStyle, RowExchange,
    ShardHooks, ShardLayout, ShardingReport, SourcedWeight, WeightCache, WeightCast, part_alignment, shared,
};
use crate::tensor::{Float8Tensor, experts_of, parallel_of, source_of};
use crate::terms::{Operand, Reason, Role};

/// A new layer like `layer` with its configured policy and its part on this rank, and with its weight
/// from `source`.
pub fn with_source<B: Float8Backend>(layer: &Layer, source: Arc<dyn ShardHooks<B>>) -> Arc<Layer> {
    let new = copied(layer).with_source(source);
    Arc::new(match parallel::<B>(layer) {
        Some(part) => new.with_parallel(part),
        None => new,
    })
}

fn copied(layer: &Layer) -> Layer {
    Layer::new(layer.name(), Policy::clone(&layer.configured()), layer.applied().clone())
}

/// A new layer like `layer` with its configured policy, for this rank's part of the weight.
pub fn with_parallel<B: Float8Backend>(layer: &Layer, part: Arc<dyn ParallelHooks<B>>) -> Arc<Layer> {
    Arc::new(copied(layer).with_parallel(part))
}

/// Part of a layer on this rank, if ranks divide it.
pub fn parallel<B: Float8Backend>(layer: &Layer) -> Option<Arc<dyn ParallelHooks<B>>> {
    parallel_of(layer).cloned()
}

/// A new layer like `layer` with its configured policy, for this rank's experts.
pub fn with_experts<B: Float8Backend>(layer: &Layer, experts: Arc<dyn ExpertHooks<B>>) -> Arc<Layer> {
    Arc::new(copied(layer).with_experts(experts))
}

/// Experts of a layer on this rank, if ranks divide them.
pub fn experts<B: Float8Backend>(layer: &Layer) -> Option<Arc<dyn ExpertHooks<B>>> {
    experts_of(layer).cloned()
}

/// A layer in high precision, with the conversion of `like`.
pub fn in_high_precision(name: String, like: Option<&Layer>) -> Arc<Layer> {
    let applied = like.map(|layer| layer.applied().clone()).unwrap_or_default();
    Arc::new(Layer::new(name, Policy::HighPrecision(Reason::Off), applied))
}

/// Source of a layer's weight, if it has one.
pub fn source<B: Float8Backend>(layer: &Layer) -> Option<Arc<dyn ShardHooks<B>>> {
    source_of(layer).cloned()
}

/// Tags the tensor as the weight of a layer.
pub fn weight_of<B: Float8Backend>(layer: Arc<Layer>, tensor: Float8Tensor<B>) -> Float8Tensor<B> {
    tensor.tagged(Tag::new(layer))
}

/// Format and scales of an FP8-only weight, for comparisons between ranks; None for any other weight.
pub fn describe_codes<B: Float8Backend>(weight: &Float8Tensor<B>) -> Option<String> {
    weight.codes().map(|codes| codes.describe())
}

/// Configuration applied to a layer.
pub fn config(layer: &Layer) -> &Float8Config {
    &layer.applied().config
}

/// Configured policy of a layer, before any fallback.
pub fn configured(layer: &Layer) -> Arc<Policy> {
    layer.configured()
}

/// Indices of the names that a pattern matches, by the rules of `filter_fqns`.
///
/// # Errors
/// If the glob is invalid, or nothing matches.
pub fn matching(field: &'static str, pattern: &str, names: &[String]) -> Result<Vec<usize>, Float8Error> {
    let infos: Vec<_> = names.iter().map(|name| LinearInfo { name: name.clone(), k: 0, n: 0 }).collect();
    matches(field, pattern, &infos)
}

/// Whether both layers belong to the same application of a configuration.
pub fn are_applied_together(one: &Layer, other: &Layer) -> bool {
    Arc::ptr_eq(one.applied(), other.applied())
}

/// Granularities of a weight's copies `[N, K]` and `[K, N]`. None if the operand stays in high
/// precision.
pub fn weight_granularities(policy: &Policy) -> [Option<Granularity>; 2] {
    [Operand::WEIGHT_T, Operand::WEIGHT].map(|operand| {
        let cast = policy.casts()?[operand];
        (!cast.is_disabled()).then_some(cast.scaling_granularity)
    })
}

/// Whether a weight keeps its copies until it changes. Otherwise a GEMM casts its copy and drops
/// it.
pub fn keeps_weight_copies(policy: &Policy) -> bool {
    !matches!(policy, Policy::Float8(config) if config.force_recompute_fp8_weight_in_bwd())
}

/// Granularities of the copies of x and dy in FP8.
pub fn token_granularities(policy: &Policy) -> Vec<Granularity> {
    let Some(casts) = policy.casts() else { return vec![] };
    let of_tokens = Operand::ALL.into_iter().filter(|operand| operand.role != Role::Weight);
    let casts = of_tokens.map(|operand| casts[operand]).filter(|cast| !cast.is_disabled());
    casts.map(|cast| cast.scaling_granularity).collect()
}

/// Granularity of the copy `[K, M]` of its input that a linear keeps for backward. None in high
/// precision.
pub fn input_granularity(policy: &Policy) -> Option<Granularity> {
    let cast = policy.casts()?[Operand::INPUT_T];
    (!cast.is_disabled()).then_some(cast.scaling_granularity)
}

/// Weights of a model that ranks divide and that are read in FP8.
pub fn sourced_weights<B: Float8Stack, M: Module<B>>(model: &M) -> Vec<SourcedWeight<B::Inner>> {
    let sourced =
        |FoundLinear { tag, weight, .. }: FoundLinear<B>| SourcedWeight::new(B::float8_tensor(&weight?), tag?);
    linears::<B, M>(model, None).into_iter().filter_map(sourced).collect()
}

/// Sets the ranks that end steps together on a device, for a layer's applied configuration. All
/// ranks train `layers` in this order.
pub fn set_peers<B: Float8Backend>(
    layer: &Layer,
    device: &Device<B>,
    layers: &[Arc<Layer>],
    hooks: Arc<dyn PeerExchange<B>>,
) {
    DeviceState::<B>::of(layer, device).set_peers(Peers::new(hooks, device.clone(), layers));
}

/// Function that gathers a sharded weight as an autodiff node. None if the backend has no FP8.
pub fn full_tensor<B: Backend>() -> Option<fn(FloatTensor<B>) -> FloatTensor<B>> {
    find::<B>().map(|functions| functions.full_tensor)
}
