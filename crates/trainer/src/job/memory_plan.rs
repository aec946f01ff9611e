//! Persistent memory of a training on each rank: parameters, gradients, moments and FP8 copies.

use std::collections::{BTreeMap, HashSet};

use anyhow::{Result, bail};
use burn::tensor::DType;
use burn::tensor::backend::Backend;
use burn_float8::shard_hooks::visit_params;
use float8_shard::{Fp8Weights, JOINED_ELEMENTS, Mesh, PlanDtypes, Reshard, ShardError, ShardPlan};

use super::config::RunConfig;
use crate::config::{LoraBase, LoraSection, Precision, require};
use crate::freeze;
use crate::model::{CausalLm, MAX_TENSOR_BITS, ModelConfig, ModelSection, elements};

/// Trained parts of a model. Adapters are in every layer and not part of these.
pub(super) struct TrainedParts {
    /// First layer with a graph if there is no activation checkpointing; nothing below it is
    /// trained.
    pub(super) first: usize,
    /// Layers with trained parameters.
    pub(super) layers: usize,
    /// Whether the embedding is trained.
    pub(super) embedding: bool,
    /// Whether an untied output layer is trained.
    pub(super) output: bool,
}

/// Sharding plan of `config` for each rank of a mesh, and trained parts. Allocates nothing.
pub(super) fn plan<B: Backend, M: CausalLm<B>>(
    config: &RunConfig<impl ModelSection<Config = M::Config>>,
    dims: &M::Config,
    mesh: Mesh,
    compute: DType,
    device: &B::Device,
) -> Result<(ShardPlan, TrainedParts)> {
    let RunConfig { training, optimizer, parallelism, lora, .. } = config;
    let dtypes = PlanDtypes {
        compute,
        matrices: training.param_dtype.dtype(),
        moments: optimizer.state_dtype.dtype(),
        masters: optimizer.master_weights,
    };
    let mut float8 = (training.precision == Precision::Fp8).then(|| config.float8(dims));
    if let Some(float8) = float8.as_mut().filter(|_| config.holds_codes()) {
        // Drops the FP8 copies of values. FP8-only weights keep their codes.
        float8.linear = float8.linear.clone().with_force_recompute_fp8_weight_in_bwd(false);
    }
    // Position tables are not parameters, so their length does not matter.
    let model = M::new(dims.clone().with_max_seq_len(1), device)?;
    let (mut patterns, mut frozen) = (freeze::TrainedParameters::new(training)?, HashSet::new());
    let mut trained = TrainedParts { first: usize::MAX, layers: 0, embedding: false, output: false };
    // Bytes of trained parameters by layer, and outside of layers.
    let (mut layers, mut outside) = (BTreeMap::<usize, u64>::new(), 0);
    visit_params::<B, _>(&model, |param| {
        let path = param.name();
        if !patterns.has(&path) {
            frozen.insert(path);
            return;
        }
        let is_matrix = param.shape.num_dims() >= 2;
        let bytes = (if is_matrix { dtypes.matrices } else { DType::F32 }.size() * param.shape.num_elements()) as u64;
        match path.split('.').find_map(|name| name.parse().ok()) {
            Some(layer) => *layers.entry(layer).or_default() += bytes,
            None => {
                outside += bytes;
                trained.embedding |= param.module_type() == "Embedding";
                trained.output |= is_matrix && param.module_type() != "Embedding";
            }
        }
    });
    patterns.check()?;
    trained.layers = layers.len();
    trained.first = match layers.first_key_value() {
        Some((&first, _)) if !trained.embedding => first,
        None if !trained.embedding => usize::MAX,
        // The embedding feeds the first layer.
        _ => 0,
    };
    // Fraction of the gradients in memory at once.
    let mut at_once = 1.0;
    if let (true, Some(group)) = (optimizer.in_backward, training.activation_checkpointing.layers()) {
        let all = outside + layers.values().sum::<u64>();
        let mut sizes: Vec<_> = layers.into_values().collect();
        sizes.sort_unstable_by(|a, b| b.cmp(a));
        // Ranks sum the gradients of a group during backward of the next one.
        let groups = if mesh.readers() > 1 { 2 } else { 1 };
        at_once = (outside + sizes.iter().take(groups * group).sum::<u64>()) as f64 / all.max(1) as f64;
    }
    let is_trained = |path: &str| !frozen.contains(path);
    let tensor = config.tensor_plan(dims, mesh.ranks())?;
    let (of, float8_config) = (config.parallelism, float8.as_ref());
    let plan = ShardPlan::new::<B, _>(&model, mesh, &tensor, of, float8_config, dtypes, &is_trained);
    let mut plan = match plan {
        Err(error @ ShardError::Model { .. }) if mesh.tensor > 1 => {
            bail!("parallelism.tensor = {}: {error}", mesh.tensor)
        }
        plan => plan?,
    };
    config.check_tokens(plan.token_alignment, mesh.tensor)?;
    plan.gradients = (plan.gradients as f64 * at_once).ceil() as u64;
    // A tied output layer gathers the table again in its own dtype and keeps it until backward.
    let (size, element) = (dims.size(), compute.size());
    let is_kept = parallelism.reshard == Reshard::AfterStep && compute == dtypes.matrices;
    if size.tie_word_embeddings && mesh.shard > 1 && !is_kept {
        plan.gathered += (size.vocab_size / mesh.tensor * size.hidden_size * element) as u64;
    }
    if let Some(lora) = lora {
        let holds_codes = float8.is_some() && lora.base == LoraBase::Fp8;
        trained = TrainedParts { first: 0, embedding: false, output: false, ..trained };
        plan = with_adapters::<B, _>(plan, &model, lora, dtypes, holds_codes)?;
    }
    Ok((plan, trained))
}

/// Plan for adapters on a frozen model, whose linears may be FP8-only.
fn with_adapters<B: Backend, M: CausalLm<B>>(
    plan: ShardPlan,
    model: &M,
    section: &LoraSection,
    dtypes: PlanDtypes,
    holds_codes: bool,
) -> Result<ShardPlan> {
    let config = section.to_config();
    let (mut adapters, mut largest, mut too_large) = (0, 0, None);
    visit_params::<B, _>(model, |param| {
        let ("Linear", [k, n]) = (param.module_type(), &param.shape[..]) else { return };
        let path = param.name();
        let Some(linear) = path.strip_suffix(".weight").filter(|linear| config.targets(linear)) else { return };
        let rank = config.rank_of(linear);
        for side in [k, n] {
            match elements([*side, rank], MAX_TENSOR_BITS) {
                Some(size) => (adapters, largest) = (adapters + size, largest.max(size)),
                None => too_large = Some(rank),
            }
        }
    });
    for (key, said, rank) in section.ranks() {
        let reason = "an adapter would have a matrix of more than 2^40 elements";
        require(key, said, too_large != Some(rank), reason)?;
    }
    // One orientation of codes replaces the values. The other is made for a GEMM, one weight at a
    // time.
    let Fp8Weights { values, codes, copies } = plan.fp8_weights;
    let (frozen, copies) = match holds_codes {
        true => (plan.parameters - values + codes, plan.copies - copies + plan.largest[1]),
        false => (plan.parameters, plan.copies),
    };
    Ok(ShardPlan {
        parameters: frozen + 4 * adapters,
        trained: 4 * adapters,
        gradients: 4 * adapters,
        moments: 2 * dtypes.moments.size() as u64 * adapters,
        masters: 0,
        largest_gradient: 4 * largest,
        joined_gradients: 4 * adapters.min(JOINED_ELEMENTS as u64).max(largest),
        copies,
        shared_copies: plan.shared_copies.min(copies),
        // An adapter keeps the input in the compute dtype for the gradient of A.
        input_bytes: dtypes.compute.size() as f64,
        largest: [largest, plan.largest[1]],
        ..plan
    })
}
