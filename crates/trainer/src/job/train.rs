//! [`train()`]: from the configuration to a trained model.

use std::io::Write;

use anyhow::{Context, Result};
use burn::module::AutodiffModule;
use burn::tensor::backend::AutodiffBackend;
use burn_float8::backend::Float8Backend;
use burn_float8::weights::read_codes;
use burn_float8::{Float8Error, Float8Stack};
use device_select::SelectedDevice;
use float8_shard::{Communicator, ParallelPlan, ShardBackend};

use super::build_model::{
    adapt, check_storage, compute_dtype, dimensions, input_scales, prepare, prepare_outline, set_input_scales, shard,
    stored,
};
use super::config::RunConfig;
use super::finish::{Outcome, finish};
use super::text::Text;
use super::weights::Weights;
use super::{log_header, memory};
use crate::batches::TrainBatches;
use crate::checkpoint::{Checkpoints, SavedRun};
use crate::config::require;
use crate::metrics::{METRICS_FILE, Metrics};
use crate::model::{CausalLm, LanguageModel, ModelSection, TrainableModel};
use crate::profile::{PROFILE_FILE, Profiler};
use crate::{Log, ProgressLine, Run, Signals, Steps, check_report_path, digest_of_file};

/// Starting point of a run.
#[derive(Debug, Default)]
pub struct Start {
    /// Checkpoint to resume from; `None` for a new run.
    pub saved: Option<SavedRun>,
    /// Whether the checkpoint folder may already contain checkpoints of this run.
    pub is_resumed: bool,
    /// Ranks started by the launcher; `None` for a single process.
    pub comm: Option<Communicator>,
    /// Whether SIGINT, SIGTERM and SIGHUP end the run after a step, with a checkpoint if they are
    /// configured. The handlers belong to the process from the first step on.
    pub listens: bool,
    /// Whether evaluation may fall back to f32 on a device without the chosen precision.
    pub may_widen: bool,
}

/// Trains on `device`, which is `selected`, and writes the log to `out`.
///
/// The backend's default FP8 config is switched off for `device`: only linears selected by `config`
/// run in FP8. With `float8.strict`, a GEMM that unexpectedly runs in high precision is an error,
/// after the first step in FP8 or at the end.
///
/// # Errors
/// The errors of the configuration, of files and of the device, and any
/// [`RunError`](crate::RunError).
pub fn train<A: TrainableModel, B: AutodiffBackend + Float8Stack<Inner: ShardBackend>>(
    config: &RunConfig<A::Section>,
    start: &Start,
    selected: &SelectedDevice,
    device: &B::Device,
    out: &mut dyn Write,
) -> Result<Outcome> {
    config.validate()?;
    let (comm, saved) = (start.comm.clone().unwrap_or_else(Communicator::solo), start.saved.as_ref());
    let (ranks, is_first, done) = (comm.world_size(), comm.rank() == 0, saved.map_or(0, SavedRun::step));
    let progress = if is_first { ProgressLine::new() } else { ProgressLine::hidden() };
    let out = &mut Log::new(out, &progress);
    comm.agree("the program", &program(&comm))?;
    comm.agree("configuration", &config.to_toml()?)?;
    config.parallelism.mesh(ranks)?;
    // The order matters. Errors of files and settings come before the device is used, and the
    // memory is announced before anything is allocated. Nothing is written before these checks.
    config.fp8_report.iter().flatten().try_for_each(|path| check_report_path(path))?;
    let text = config.text()?;
    all_or_none(&comm, "the data", config.data.check(&text.tokenizer, text.template.as_ref()))?;
    let prompt = text.longest_prompt(&config.generate)?;
    let dims = dimensions(config, Some(config.training.seq_len), prompt.as_slice())?;
    let plan = config.tensor_plan(&dims, ranks)?;
    let profile = config.training.profile_steps.filter(|[_, last]| *last > done);
    let file = config.file(PROFILE_FILE).filter(|_| is_first);
    let profiler = profile.map(|profile| Profiler::prepare::<B>(profile, file, selected, device)).transpose()?;
    let dtype = compute_dtype::<B, _>(config, selected, device)??;
    check_storage::<B, _>(config, selected, device)?;
    let computed = (dtype, B::Inner::fp8_facts(device).attention_of(dtype));
    log_header::model(config, selected, computed, &dims, &text.tokenizer, out)?;

    let weights = all_or_none(&comm, "the weights", Weights::open(config, saved, dims.clone()))?;
    if ranks > 1 {
        let digests = all_or_none(&comm, "the weights", weights.digests(config))?;
        comm.agree("the weights", &digests)?;
    }
    let announced = memory::announce::<B, A::Trained<B>>(config, &dims, ranks, (selected, device), out);
    all_or_none(&comm, "the memory", announced)?;
    let checkpoints =
        Checkpoints::new(&config.checkpoint, &comm, !start.is_resumed, |folder| config.copy_assets(folder));
    let checkpoints = all_or_none(&comm, "the folder of checkpoints", checkpoints)?;
    let data = all_or_none(&comm, "the data", config.open_data(&text, &progress, out))?;
    comm.agree("the data", &data.fingerprints())?;
    let (held_out, batches) = (config.held_out_batches(&data)?, config.train_batches(&data)?);
    log_header::data(config, &data, &batches, config.readers(ranks)?, out)?;
    let is_chat = data.has_conversations() || text.template.is_some();

    let asked = config;
    let config = &asked.with_steps(&batches, ranks)?;
    log_header::schedule(asked, config, saved, out)?;
    let steps = config.training.steps;
    require("training.steps", steps, done <= steps.get(), &format!("the checkpoint is of step {done}"))?;
    if done == steps.get() {
        writeln!(out, "finished: all {steps} steps are done; `--steps` asks for more")?;
    }
    let (model, weights) = match ranks {
        1 => (prepare::<A, B>(config, weights, device, &progress, out), None),
        _ => (prepare_outline::<A, B>(config, &weights, device, out), Some(weights)),
    };
    let model = all_or_none(&comm, "the model", model)?.with_compute_dtype(dtype);
    let resolved = config.to_toml()?;
    // A new run replaces the file in its folder.
    let open = if start.is_resumed { Metrics::append } else { Metrics::create };
    let metrics = config.file(METRICS_FILE).filter(|_| is_first).map(|path| open(&path)).transpose();
    let signals = match start.listens {
        true => Signals::listen().context("cannot listen to signals")?,
        false => Signals::default(),
    };
    let run = Run {
        config: config.steps(),
        selected,
        device,
        held_out: &held_out,
        checkpoints: checkpoints.map(|checkpoints| checkpoints.with_config(resolved)),
        profiler,
        metrics: all_or_none(&comm, "the file of metrics", metrics)?,
        signals,
        progress: progress.clone(),
        out,
    };
    let ready = Ready { config, saved, plan, comm: &comm, text: &text, is_chat, weights, batches, run };
    match &config.lora {
        None => {
            // FP8-only weights are frozen, so nothing could be trained.
            let codes = read_codes::<B, _>(&model).next().map(|(layer, _)| Float8Error::Fp8OnlyTrained { layer });
            codes.map_or(Ok(()), Err)?;
            ready.run::<A, _>(model, |model| model)
        }
        Some(lora) => {
            let adapted = adapt::<B, _>(lora, model, config.training.seed, saved);
            let adapted = all_or_none(&comm, "the adapters", adapted)?;
            ready.run::<A, _>(adapted, |adapted| adapted.attached())
        }
    }
}

/// A run, and what its model needs before the first step.
struct Ready<'a, S: ModelSection, B: AutodiffBackend> {
    /// Configuration with a known number of steps.
    config: &'a RunConfig<S>,
    saved: Option<&'a SavedRun>,
    /// Plan of tensor parallelism; empty without it.
    plan: ParallelPlan,
    comm: &'a Communicator,
    text: &'a Text,
    is_chat: bool,
    /// Weights that several ranks load after they have divided the model.
    weights: Option<Weights<'a, S::Config>>,
    batches: TrainBatches,
    run: Run<'a, B>,
}

impl<S: ModelSection, B: AutodiffBackend + Float8Stack<Inner: ShardBackend>> Ready<'_, S, B> {
    /// Runs the steps on a model; `made` converts it at the end.
    fn run<A, M>(self, model: M, made: impl FnOnce(M) -> A::Trained<B>) -> Result<Outcome>
    where
        A: TrainableModel<Section = S>,
        M: LanguageModel<B> + AutodiffModule<B, InnerModule: LanguageModel<B::InnerBackend>>,
    {
        let Self { config, saved, plan, comm, weights, run, .. } = self;
        log_header::trainable(config, &model, run.out)?;
        let (mut model, ranks) = shard::<B, _, _>(config, model, &plan, comm, run.out)?;
        if let Some(weights) = weights {
            let (matrices, codes) = (stored::<B, _>(config, run.device), config.holds_codes());
            let input_scales = input_scales(config, &weights);
            let loaded = weights.load_shards::<B, _>(model, matrices, codes, &run.progress, run.out);
            model = all_or_none(comm, "the model", loaded)?;
            set_input_scales::<B, _>(&model, &all_or_none(comm, "the scales of inputs", input_scales)?)?;
        }
        let mut steps = Steps::new(config.steps(), model, self.batches, ranks)?;
        if let Some(saved) = saved {
            steps = steps.resume(saved)?;
            writeln!(run.out, "resumed: step {} of {}", saved.step(), saved.path().display())?;
        }
        finish::<A, B, M>(config, self.text, self.is_chat, run, steps, made)
    }
}

/// Digest of this executable, which every rank must run. A single process does not read it.
fn program(comm: &Communicator) -> String {
    let version = || format!("version {}", env!("CARGO_PKG_VERSION"));
    let file = || digest_of_file(&std::env::current_exe()?);
    if comm.world_size() == 1 { version() } else { file().unwrap_or_else(|_| version()) }
}

/// Returns `result`. If another rank failed, returns an error with its message.
fn all_or_none<T>(comm: &Communicator, what: &str, result: Result<T, impl Into<anyhow::Error>>) -> Result<T> {
    let result = result.map_err(Into::into);
    let told = comm.all_ok(what, result.as_ref().map(drop).map_err(|error| format!("{error:#}")));
    let value = result?;
    told?;
    Ok(value)
}
