//! Builds a run's model: dimensions, compute dtype, weights, FP8 and sharding.

use std::collections::HashMap;
use std::io::Write;

use anyhow::{Result, anyhow};
use burn::module::{AutodiffModule, Module};
use burn::tensor::DType;
use burn::tensor::backend::{AutodiffBackend, Backend};
use burn_float8::config::{Granularity, Operand, Policy, ScalingType};
use burn_float8::lora::{LoraAdapter, LoraConfig};
use burn_float8::report::{AmaxState, LayerState};
use burn_float8::shard_hooks::visit_params;
use burn_float8::weights::{fp8_only, read_codes};
use burn_float8::{Float8Config, Float8Error, Float8Stack, Float8State, Recipe, set_default_config};
use device_select::SelectedDevice;
use float8_shard::{Communicator, ParallelPlan, ShardBackend, ShardError, Sharded, TensorParallel};

use super::config::RunConfig;
use super::weights::Weights;
use crate::checkpoint::SavedRun;
use crate::config::{ConfigError, LoraSection, Precision, StorageDtype, require};
use crate::hf::{Checkpoint, peft};
use crate::model::{CacheDtype, LanguageModel, ModelConfig, ModelSection, ModelSize, TrainableModel};
use crate::storage::store_matrices;
use crate::{Adapted, ProgressLine, Ranks, lora_model};

/// Dimensions of the model. Rotary tables are only as long as the task needs: sequences of
/// `seq_len`, and new tokens after prompts of these lengths.
pub(super) fn dimensions<S: ModelSection>(
    config: &RunConfig<S>,
    seq_len: Option<usize>,
    prompts: &[usize],
) -> Result<S::Config> {
    let dims = config.dimensions()?;
    let ModelSize { max_seq_len, num_layers, .. } = dims.size();
    if let Some(seq_len) = seq_len {
        let reason = format!("the model has {max_seq_len} positions");
        require("training.seq_len", seq_len, seq_len <= max_seq_len, &reason)?;
        if let Some(layers) = config.training.activation_checkpointing.layers() {
            let (reason, fits) = (format!("num_layers is {num_layers}"), layers <= num_layers);
            require("training.activation_checkpointing", layers, fits, &reason)?;
        }
    }
    let new = config.generate.max_new_tokens;
    let longest = prompts.iter().zip(1..).max_by_key(|(tokens, _)| **tokens);
    let generated = longest.map_or(0, |(tokens, _)| tokens.saturating_add(new));
    if let Some((tokens, number)) = longest {
        let prompt = match prompts.len() {
            1 => format!("a prompt of {tokens} tokens"),
            _ => format!("the {tokens} tokens of prompt {number}"),
        };
        let reason = format!("with {prompt} exceeds the model's {max_seq_len} positions");
        require("generate.max_new_tokens", new, generated <= max_seq_len, &reason)?;
    }
    Ok(dims.with_max_seq_len(generated.max(seq_len.unwrap_or(1)).max(1)))
}

/// Dtype of hidden states. The inner error says that the device does not compute in it.
pub(super) fn compute_dtype<B: Backend, S>(
    config: &RunConfig<S>,
    selected: &SelectedDevice,
    device: &B::Device,
) -> Result<anyhow::Result<DType>, ConfigError> {
    let training = &config.training;
    let implied = match (training.precision, selected) {
        (Precision::F32, _) => StorageDtype::F32,
        (Precision::Bf16, _) | (Precision::Fp8, SelectedDevice::Cuda) => StorageDtype::Bf16,
        (Precision::Fp8, _) => StorageDtype::F32,
    };
    let chosen = training.compute_dtype.unwrap_or(implied);
    if training.precision != Precision::Fp8 && chosen != implied {
        let reason = format!("precision {:?} computes in {implied:?}", training.precision).to_lowercase();
        let value = format!("{chosen:?}").to_lowercase();
        return Err(ConfigError::Value { key: "training.compute_dtype", value, reason });
    }
    let dtype = chosen.dtype();
    Ok(match B::supports_dtype(device, dtype) {
        true => Ok(dtype),
        false => Err(anyhow!(
            "{selected} does not compute in {}: use precision f32, or fp8 with training.compute_dtype = \"f32\"",
            format!("{dtype:?}").to_lowercase()
        )),
    })
}

/// Checks that the device supports the dtypes of parameters and moments.
pub(super) fn check_storage<B: Backend, S>(
    config: &RunConfig<S>,
    selected: &SelectedDevice,
    device: &B::Device,
) -> Result<(), ConfigError> {
    let kept = [
        ("training.param_dtype", config.training.param_dtype),
        ("optimizer.state_dtype", config.optimizer.state_dtype),
    ];
    kept.into_iter().try_for_each(|(key, kept)| {
        let reason = format!("{selected} does not have it: leave the key out");
        require(key, format!("{kept:?}").to_lowercase(), B::supports_dtype(device, kept.dtype()), &reason)
    })
}

/// Checks that the device supports the dtype of the cache of keys and values.
pub(super) fn check_cache<B: Backend, S>(
    config: &RunConfig<S>,
    selected: &SelectedDevice,
    device: &B::Device,
) -> Result<(), ConfigError> {
    let holds = config.generate.kv_cache != Some(CacheDtype::Bf16) || B::supports_dtype(device, DType::BF16);
    require("--kv-cache", "bf16", holds, &format!("{selected} does not have it: choose f32 or e4m3"))
}

/// Model with these weights, with FP8 applied if `config` enables it.
///
/// The backend's default FP8 config is switched off for `device`.
///
/// # Errors
/// Weights that do not load, an FP8 config that does not fit the model, a log that cannot be
/// written.
pub fn prepare<A: TrainableModel, B: AutodiffBackend + Float8Stack>(
    config: &RunConfig<A::Section>,
    weights: Weights<'_, A::Config>,
    device: &B::Device,
    progress: &ProgressLine,
    out: &mut dyn Write,
) -> Result<A::Trained<B>> {
    let (dtype, facts) = (stored::<B, _>(config, device), Facts::of(config, &weights)?);
    let (input_scales, histories) = (input_scales(config, &weights)?, weights.histories.filter(|_| facts.is_fp8));
    let holds_codes = facts.is_fp8 && config.holds_codes();
    let weights = if holds_codes { weights.with_codes(&facts.float8, dtype) } else { weights };
    let model = store_matrices(weights.load::<B, A::Trained<B>>(device, progress, out)?, dtype);
    let model = facts.apply::<B, _>(model, device, out)?;
    set_input_scales::<B, _>(&model, &input_scales)?;
    if let Some(histories) = histories {
        histories.restore::<B, _>(&model)?;
    }
    if !holds_codes {
        return Ok(model);
    }
    let (model, fp8_only) = fp8_only::<B, _>(model.no_grad()).map_err(Float8Error::from)?;
    writeln!(out, "{fp8_only}")?;
    if config.float8.config.linear.mx_square_weights()
        && let Some((name, codes)) = read_codes::<B, _>(&model).next()
        && codes.granularity == Granularity::Block1x32
        && !codes.is_square()
    {
        writeln!(
            out,
            "warning: float8.mx_square_weights: the codes of {name} were cast by 1x32 and stay so; a backward decodes them, and casts them again"
        )?;
    }
    Ok(model)
}

/// The model without its parameters, with FP8 applied if `config` enables it. Ranks divide it, and
/// then [load](Weights::load_shards) their rows.
///
/// # Errors
/// The errors of [`prepare`].
pub(super) fn prepare_outline<A: TrainableModel, B: AutodiffBackend + Float8Stack>(
    config: &RunConfig<A::Section>,
    weights: &Weights<'_, A::Config>,
    device: &B::Device,
    out: &mut dyn Write,
) -> Result<A::Trained<B>> {
    let model = weights.outline::<B, A::Trained<B>>(device, stored::<B, _>(config, device))?;
    Facts::of(config, weights)?.apply::<B, _>(model, device, out)
}

/// Dtype of matrices. Evaluation may run on a device without bf16: f32 has the same values.
pub(super) fn stored<B: Backend, S>(config: &RunConfig<S>, device: &B::Device) -> DType {
    let dtype = Some(config.training.param_dtype.dtype()).filter(|dtype| B::supports_dtype(device, *dtype));
    dtype.unwrap_or(DType::F32)
}

/// FP8 configuration of a model, and facts of its files.
struct Facts {
    is_fp8: bool,
    float8: Float8Config,
    notes: Vec<String>,
}

impl Facts {
    fn of<S: ModelSection<Config = C>, C: ModelConfig>(
        config: &RunConfig<S>,
        weights: &Weights<'_, C>,
    ) -> Result<Self> {
        let is_fp8 = config.training.precision == Precision::Fp8;
        Ok(Self { is_fp8, float8: config.float8(weights.dims()), notes: notes_on_files(config, weights)? })
    }

    /// Applies FP8 if the configuration enables it.
    fn apply<B: AutodiffBackend + Float8Stack, M: AutodiffModule<B>>(
        self,
        model: M,
        device: &B::Device,
        out: &mut dyn Write,
    ) -> Result<M> {
        set_default_config::<B>(device, None)?;
        if !self.is_fp8 {
            self.notes.iter().try_for_each(|note| writeln!(out, "{note}"))?;
            return Ok(model);
        }
        // Strict mode panics in the GEMM; a run reports an error instead.
        let (model, summary) = self.float8.with_strict(false).apply::<B, _>(model).map_err(Float8Error::from)?;
        writeln!(out, "{summary}")?;
        self.notes.iter().try_for_each(|note| writeln!(out, "{note}"))?;
        Ok(model)
    }
}

/// Notes on differences between a run and the FP8 folder of its parameters.
///
/// They name unused scales. In FP8 they also name requantized weights, with settings that would
/// keep their codes, and inputs.
///
/// # Errors
/// [`Float8Error`](burn_float8::Float8Error) for an FP8 config that does not fit the model.
pub(super) fn notes_on_files<S: ModelSection<Config = C>, C: ModelConfig>(
    config: &RunConfig<S>,
    weights: &Weights<'_, C>,
) -> Result<Vec<String>> {
    let mut notes: Vec<_> = weights.checkpoint().and_then(Checkpoint::unused).into_iter().collect();
    let is_fp8 = config.training.precision == Precision::Fp8;
    let (Some(checkpoint), Some(folder)) = (weights.checkpoint().filter(|_| is_fp8), config.model.hf_path()) else {
        return Ok(notes);
    };
    let [found, others] = checkpoint.cast_anew(&config.float8(weights.dims()))?;
    // Trained weights have values and are cast in each step.
    let (linear, anew) = (&config.float8.config.linear, if config.holds_codes() { &others } else { &found });
    let (recipe, folder) = (linear.recipe(), folder.display());
    if let Some(first) = anew.first() {
        let of_folder = checkpoint.recipe();
        let of = of_folder.map_or("in several formats".into(), |recipe| format!("of {recipe}"));
        let which = match anew.len() == found.len() {
            true => "which are".into(),
            false => format!("{} of which, the first {first}, are", anew.len()),
        };
        let by = if of_folder == Some(recipe) { String::new() } else { format!(" by {recipe}") };
        let mut note = format!("{folder} has FP8 weights {of}, {which} decoded and requantized{by}");
        let other = of_folder.filter(|other| *other != recipe && !others.is_empty());
        let keeps = [
            other.map(|recipe| format!("float8.recipe = \"{recipe}\"")),
            (!config.holds_codes()).then(|| "lora.base = \"fp8\"".into()),
        ];
        let keeps: Vec<_> = keeps.into_iter().flatten().collect();
        // Only frozen FP8 weights can keep their codes.
        if (config.holds_codes() || config.lora.is_some()) && !keeps.is_empty() {
            note = format!("{note}; to keep them: {}", keeps.join(", "));
        }
        notes.push(note);
    }
    if checkpoint.recipe() == Some(Recipe::Delayed)
        && linear.casts()[Operand::INPUT].scaling_type != ScalingType::Delayed
    {
        notes.push(format!("{folder} has static scales of inputs; here inputs are cast by {recipe}"));
    }
    if let Some((name, scheme)) = checkpoint.other_inputs() {
        notes.push(format!("{folder} has {name} as {scheme}; here inputs are cast by {recipe}"));
    }
    Ok(notes)
}

/// Input scales of an FP8 folder, by path of the linear, for a run in FP8.
pub(super) fn input_scales<S, C: ModelConfig>(
    config: &RunConfig<S>,
    weights: &Weights<'_, C>,
) -> Result<Vec<(String, f32)>> {
    if config.training.precision == Precision::Fp8 { weights.input_scales() } else { Ok(vec![]) }
}

/// Initializes the amax histories of linear inputs from the scales of a checkpoint, for delayed
/// scaling, once the weights are loaded: newer weights would end the step that this begins.
///
/// ```text
/// amax = FMAX · input_scale, so that scale = FMAX / amax
/// ```
pub(super) fn set_input_scales<B: AutodiffBackend + Float8Stack, M: AutodiffModule<B>>(
    model: &M,
    scales: &[(String, f32)],
) -> Result<(), Float8Error> {
    let mut state = Float8State { step: 1, has_begun: true, ..Float8State::default() };
    let scales: HashMap<&str, f32> = scales.iter().map(|(name, scale)| (name.as_str(), *scale)).collect();
    visit_params::<B, _>(model, |param| {
        let Some(layer) = param.float().and_then(|weight| B::layer(&weight)) else { return };
        let (Policy::Float8(config), Some(scale)) = (layer.policy(), scales.get(layer.name())) else { return };
        let cast = &config.casts()[Operand::INPUT];
        if cast.scaling_type == ScalingType::Delayed {
            let (scaling, amax) = (config.delayed_scaling(), (cast.target_dtype.max() * scale).to_bits());
            let history = vec![amax; scaling.amax_history_len];
            let input = AmaxState { history, scaling_amax: Some(amax), observed: vec![] };
            let layer_state =
                LayerState { delayed_scaling: Some(scaling), input: Some(input), ..LayerState::default() };
            state.layers.insert(param.path.linear_name(), layer_state);
        }
    });
    if state.layers.is_empty() { Ok(()) } else { state.restore::<B, M>(model) }
}

/// Model with adapters: the checkpoint's, the ones in `section.adapter`, or new ones from the seed.
///
/// # Errors
/// [`Float8Error::Config`] for `target_modules`; errors of the folder or the checkpoint.
pub fn adapt<B: AutodiffBackend + Float8Stack, M>(
    section: &LoraSection,
    model: M,
    seed: u64,
    saved: Option<&SavedRun>,
) -> Result<Adapted<B, M>>
where
    M: LanguageModel<B> + AutodiffModule<B, InnerModule: LanguageModel<B::InnerBackend>>,
{
    let config = section.to_config();
    let mut lora = config.init::<B, M>(&model, seed)?;
    if let (Some(folder), None) = (&section.adapter, saved) {
        let found = peft::read_config(folder)?;
        for LoraAdapter { name, .. } in &lora.adapters {
            let of = |config: &LoraConfig| (config.rank_of(name), config.alpha_of(name));
            let ((rank, alpha), (own_rank, own_alpha)) = (of(&found), of(&config));
            let reason = format!(
                "its rank is {rank} and its alpha {alpha}, lora.rank {own_rank} and lora.alpha {own_alpha}, for {name}"
            );
            require("lora.adapter", folder.display(), (rank, alpha) == (own_rank, own_alpha), &reason)?;
        }
        lora = peft::load(lora, folder)?;
    }
    let adapted = Adapted::new(model, lora);
    match saved {
        Some(saved) => Ok(saved.load_parameters(adapted, &mut |_| ())?),
        None => Ok(adapted),
    }
}

/// Shards the model if there are several ranks, after `plan` has divided its linears, unless it is empty.
pub(super) fn shard<B: AutodiffBackend + Float8Stack<Inner: ShardBackend>, M: AutodiffModule<B>, S>(
    config: &RunConfig<S>,
    mut model: M,
    plan: &ParallelPlan,
    comm: &Communicator,
    out: &mut dyn Write,
) -> Result<(M, Option<Ranks>)> {
    if comm.world_size() == 1 {
        return Ok((model, None));
    }
    let mut parallel = None;
    if !plan.is_empty() {
        let ranks = config.parallelism.tensor_ranks(comm)?;
        let plan = if config.lora.is_some() { lora_model::tensor_plan::<B, _>(&model, plan) } else { plan.clone() };
        let (divided, handle) = TensorParallel::apply::<B, _>(model, &ranks, &plan).map_err(ShardError::from)?;
        writeln!(out, "Linears divided over {} ranks", ranks.world_size())?;
        (model, parallel) = (divided, Some(handle));
    }
    let (model, sharded) = Sharded::apply::<B, _>(model, comm, config.parallelism).map_err(ShardError::from)?;
    let summary = sharded.summary();
    if summary.ranks * summary.replicas > 1 {
        writeln!(out, "{summary}")?;
    }
    let ranks = Ranks::new::<B, _>(sharded, parallel, &model);
    Ok((model, Some(ranks)))
}
