//! Estimates peak memory and checks that it fits before allocating.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::io::Write;

use burn::module::Module;
use burn::tensor::DType;
use burn::tensor::backend::Backend;
use burn_float8::Float8Config;
use burn_float8::shard_hooks::visit_params;
use burn_float8::weights::linear_infos;
use device_select::SelectedDevice;
use float8_shard::{JOINED_ELEMENTS, PlanDtypes, Reshard, ShardPlan};

use super::config::RunConfig;
use super::estimate::{Estimated, MemoryEstimate, Trained};
use super::prepare::{check_storage, compute_dtype};
use super::room::{check, size, there};
use crate::JobError;
use crate::config::{ActivationCheckpointing, LoraBase, LoraSection, Precision, require};
use crate::freeze;
use crate::model::{CausalLm, MAX_TENSOR_BITS, ModelConfig, ModelSection, elements};

/// Sharding plan of `config` for each of `ranks` ranks. Allocates nothing.
///
/// # Errors
/// The errors of the configuration, including FP8 filters that match no linear.
fn plan<B: Backend, M: CausalLm<B>>(
    config: &RunConfig<impl ModelSection<Config = M::Config>>,
    dims: M::Config,
    ranks: usize,
    dtype: DType,
    device: &B::Device,
) -> Result<(ShardPlan, Trained), JobError> {
    let dtypes = PlanDtypes {
        compute: dtype,
        matrices: config.training.param_dtype.dtype(),
        moments: config.optimizer.state_dtype.dtype(),
        masters: config.optimizer.master_weights,
    };
    // A tied output layer gathers the table again in its own dtype and keeps it until backward.
    let is_kept = config.parallelism.reshard == Reshard::AfterStep && dtype == dtypes.matrices;
    let size = dims.size();
    let tied = match size.tie_word_embeddings && ranks > 1 && !is_kept {
        true => (size.vocab_size * size.hidden_size * dtype.size()) as u64,
        false => 0,
    };
    let mut float8 = (config.training.precision == Precision::Fp8).then(|| config.float8(&dims));
    if let Some(float8) = float8.as_mut().filter(|_| config.holds_codes()) {
        // Drops the FP8 copies of values. FP8-only weights keep their codes.
        float8.linear = float8.linear.clone().with_force_recompute_fp8_weight_in_bwd(false);
    }
    // Position tables are not parameters, so their length does not matter.
    let model = M::new(dims.with_max_seq_len(1), device)?;
    let (trained, frozen) = trained::<B, _>(&model, config)?;
    let is_trained = |path: &str| !frozen.contains(path);
    let plan = ShardPlan::new::<B, _>(&model, ranks, config.sharding(), float8.as_ref(), dtypes, &is_trained)?;
    let group = config.training.activation_checkpointing;
    let gradients = match config.optimizer.in_backward {
        true => {
            let [at_once, all] = gradients_at_once::<B, _>(&model, group, dtypes.matrices, &frozen);
            // A rank has only its rows.
            (u128::from(plan.gradients) * u128::from(at_once)).div_ceil(u128::from(all.max(1))) as u64
        }
        false => plan.gradients,
    };
    let plan = ShardPlan { gathered: plan.gathered + tied, gradients, ..plan };
    let plan = match &config.lora {
        Some(lora) => {
            let of_codes = float8.as_ref().filter(|_| lora.base == LoraBase::Fp8);
            let codes = of_codes.map_or(Ok(0), |float8| elements_in_float8::<B, _>(&model, float8))?;
            with_adapters::<B, _>(plan, &model, lora, (dtypes, codes))?
        }
        None => plan,
    };
    Ok((plan, trained))
}

/// Trained parts of a model and the names of frozen parameters. Adapters are in every layer and not
/// part of these.
fn trained<B: Backend, M: Module<B>>(
    model: &M,
    config: &RunConfig<impl Sized>,
) -> Result<(Trained, HashSet<String>), JobError> {
    let (mut trained, mut frozen) = (freeze::Trained::new(&config.training)?, HashSet::new());
    // Layers with trained parameters.
    let mut layers = BTreeSet::new();
    let [mut embedding, mut output] = [false; 2];
    visit_params::<B, _>(model, |param| {
        let path = param.name();
        if !trained.has(&path) {
            frozen.insert(path);
            return;
        }
        match path.split('.').find_map(|name| name.parse().ok()) {
            Some(layer) => drop(layers.insert(layer)),
            None if param.module_type() == "Embedding" => embedding = true,
            None => output |= param.shape.num_dims() == 2,
        }
    });
    trained.check()?;
    if config.lora.is_some() {
        return Ok((Trained { first: 0, layers: layers.len(), embedding: false, output: false }, frozen));
    }
    // The embedding feeds the first layer.
    let first = if embedding { 0 } else { layers.first().copied().unwrap_or(usize::MAX) };
    Ok((Trained { first, layers: layers.len(), embedding, output }, frozen))
}

/// Elements of linear weights that are cast to FP8.
fn elements_in_float8<B: Backend, M: Module<B>>(model: &M, float8: &Float8Config) -> Result<u64, JobError> {
    let linears = linear_infos::<B, M>(model, float8);
    let policies = float8.resolve(&linears)?;
    let of_codes = linears.iter().zip(policies).filter(|(_, policy)| policy.weight_cast().is_some());
    Ok(of_codes.map(|(linear, _)| (linear.k * linear.n) as u64).sum())
}

/// Plan for adapters on a frozen model. `codes` elements of the model are FP8 only.
fn with_adapters<B: Backend, M: Module<B>>(
    plan: ShardPlan,
    model: &M,
    section: &LoraSection,
    (dtypes, codes): (PlanDtypes, u64),
) -> Result<ShardPlan, JobError> {
    let config = section.to_config();
    // Elements of all adapters and of the largest adapter matrix, and the rank of a matrix that is
    // too large.
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
    let reason = "an adapter would have a matrix of more than 2^40 elements";
    for (key, said, rank) in section.ranks() {
        require(key, said, too_large != Some(rank), reason)?;
    }
    let values = dtypes.matrices.size() as u64;
    // One orientation replaces the values. The other is made for a GEMM, one weight at a time.
    let (frozen, copies) = match section.base {
        LoraBase::Fp8 => {
            let one = plan.copies.div_ceil(2);
            (plan.parameters - (values * codes).min(plan.parameters) + one, plan.largest[1])
        }
        LoraBase::Values => (plan.parameters, plan.copies),
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

/// Bytes of gradients in memory at once when applied in backward, and bytes of all gradients. The
/// first counts a group of layers and the parameters outside of layers, such as the output layer
/// and the embedding.
fn gradients_at_once<B: Backend, M: Module<B>>(
    model: &M,
    group: ActivationCheckpointing,
    matrices: DType,
    frozen: &HashSet<String>,
) -> [u64; 2] {
    // Keyed by the path up to its first number, if any.
    let mut bytes = BTreeMap::<Option<String>, u64>::new();
    visit_params::<B, _>(model, |param| {
        let path = param.name();
        if frozen.contains(&path) {
            return;
        }
        let names: Vec<_> = path.split('.').collect();
        let number = names.iter().position(|name| name.parse::<usize>().is_ok());
        let kept = if param.shape.num_dims() < 2 { DType::F32 } else { matrices }.size();
        let layer = number.map(|number| names[..=number].join("."));
        *bytes.entry(layer).or_default() += (kept * param.shape.num_elements()) as u64;
    });
    let others = bytes.remove(&None).unwrap_or(0);
    let at_once = match group {
        ActivationCheckpointing::None => usize::MAX,
        ActivationCheckpointing::Every(layers) => layers.get(),
    };
    let mut sizes: Vec<_> = bytes.into_values().collect();
    sizes.sort_unstable_by(|a, b| b.cmp(a));
    [others + sizes.iter().take(at_once).sum::<u64>(), others + sizes.iter().sum::<u64>()]
}

/// Memory of a step, if the model reports the bytes of its layers.
pub(super) fn estimate<B: Backend, M: CausalLm<B>>(
    config: &RunConfig<impl ModelSection<Config = M::Config>>,
    dims: &M::Config,
    ranks: usize,
    selected: &SelectedDevice,
    device: &B::Device,
) -> Result<Option<MemoryEstimate>, JobError> {
    let dtype = compute_dtype::<B, _>(config, selected, device)?;
    let plan = plan::<B, M>(config, dims.clone(), ranks, dtype, device)?;
    Ok(of_plan(config, dims, &plan, dtype, selected))
}

/// Checks settings that a run over `ranks` ranks on this device would refuse.
///
/// # Errors
/// The errors of the configuration.
pub(super) fn check_settings<B: Backend>(
    config: &RunConfig<impl ModelSection>,
    ranks: usize,
    selected: &SelectedDevice,
    device: &B::Device,
) -> Result<(), JobError> {
    config.validate()?;
    config.check_ranks(ranks)?;
    Ok(check_storage::<B, _>(config, selected, device)?)
}

/// Memory of a step, given the sharding plan.
fn of_plan<S: ModelSection>(
    config: &RunConfig<S>,
    dims: &S::Config,
    (plan, trained): &(ShardPlan, Trained),
    dtype: DType,
    selected: &SelectedDevice,
) -> Option<MemoryEstimate> {
    let RunConfig { training, optimizer, checkpoint, .. } = config;
    let (trained, is_host) = (*trained, *selected == SelectedDevice::Cpu);
    Estimated { training, optimizer, checkpoint, dims, plan, dtype, trained, is_host }.estimate()
}

/// Prints the memory of a step and whether it fits.
///
/// # Errors
/// [`JobError::StepMemory`] if it does not fit, [`JobError::NoEstimate`], the errors of the
/// configuration.
pub(super) fn tell<B: Backend, M: CausalLm<B>>(
    config: &RunConfig<impl ModelSection<Config = M::Config>>,
    dims: M::Config,
    ranks: usize,
    available: Option<u64>,
    selected: &SelectedDevice,
    device: &B::Device,
    out: &mut dyn Write,
) -> Result<(), JobError> {
    let estimate = estimate::<B, M>(config, &dims, ranks, selected, device)?.ok_or(JobError::NoEstimate)?;
    writeln!(out, "{estimate}\n")?;
    let peak = estimate.peak();
    let Some(there) = available.or_else(|| there(selected)) else {
        return Ok(writeln!(out, "peak: {}; how much {selected} has is unknown: --available says it", size(peak))?);
    };
    if peak <= there {
        return Ok(writeln!(out, "peak: {} of {}: fits", size(peak), size(there))?);
    }
    Err(JobError::StepMemory { needed: size(peak), there: size(there) })
}

/// Prints the memory of a step and refuses a run that does not fit.
///
/// The estimate may be off by 10 %: if it exceeds the memory by less, it only prints a warning.
///
/// # Errors
/// [`JobError::StepMemory`]. For a model without an estimate, [`JobError::Memory`] if the known
/// part does not fit.
pub(super) fn check_step<B: Backend, M: CausalLm<B>>(
    config: &RunConfig<impl ModelSection<Config = M::Config>>,
    dims: &M::Config,
    ranks: usize,
    dtype: DType,
    (selected, device): (&SelectedDevice, &B::Device),
    out: &mut dyn Write,
) -> Result<(), JobError> {
    let planned = plan::<B, M>(config, dims.clone(), ranks, dtype, device)?;
    let (plan, _) = &planned;
    let [parameters, gradients, moments] = [plan.parameters, plan.gradients, plan.moments].map(size);
    let held = format!("(parameters {parameters}, gradients {gradients}, AdamW's moments {moments})");
    let whose = if ranks > 1 { format!(" on each of {ranks} ranks") } else { String::new() };
    let Some(estimate) = of_plan(config, dims, &planned, dtype, selected) else {
        let known = plan.total().max(if ranks > 1 { plan.whole } else { 0 });
        writeln!(out, "memory: {}{whose} without activations {held}", size(known))?;
        return check(known, "training", selected);
    };
    let peak = estimate.peak();
    writeln!(out, "memory: a step takes about {}{whose} {held}", size(peak))?;
    match there(selected) {
        Some(there) if peak / 11 * 10 > there => Err(JobError::StepMemory { needed: size(peak), there: size(there) }),
        Some(there) if peak > there => Ok(writeln!(out, "memory: there is {}: a step may not fit", size(there))?),
        _ => Ok(()),
    }
}
