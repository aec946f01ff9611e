//! A run from its configuration to its end: data, model, steps, then a held-out loss, a sample and what the linears did.

use std::io::Write;

use burn::module::AutodiffModule;
use burn::tensor::DType;
use burn::tensor::backend::{AutodiffBackend, Backend};
use burn_float8::{Float8Error, Float8Stack, Report, report::GemmTotals, set_default_config};
use device_select::SelectedDevice;
use float8_shard::{Communicator, ShardBackend, ShardError, Sharded};
use train::checkpoint::{Checkpoints, SavedRun};
use train::config::{ComputeDtype, ConfigError, Precision, require};
use train::metrics::{Metrics, StepLine};
use train::profile::Profiler;
use train::run::{Finished, HeldOut, verify};
use train::{
    Log, ProgressLine, Ranks, Run, Signals, Steps, Tokenizer, TrainError, check_report_path, digest_of_file, report_of,
    write_report,
};

use crate::Error;
use crate::announce;
use crate::config::LlamaConfig;
use crate::generate::Sampling;
use crate::memory;
use crate::model::Llama;
use crate::run_config::RunConfig;
use crate::text::Text;
use crate::weights::Weights;

/// What a run came to.
#[derive(Clone, Debug, PartialEq)]
pub struct Outcome {
    /// The step lines.
    pub steps: Vec<StepLine>,
    /// Mean cross entropy over the held-out batches, in nats per token; none if nothing is held out.
    pub held_out_loss: Option<f64>,
    /// The smallest that it was, and after which step.
    pub best_held_out_loss: Option<(usize, f64)>,
    /// Generated text, without the prompt.
    pub sample: String,
    /// GEMMs of linears by precision, as in `report`.
    pub gemms: GemmTotals,
    /// What each linear did in training, or in evaluation if there was no step to make; empty unless FP8 was applied.
    pub report: Report,
}

/// Where a run begins.
#[derive(Debug, Default)]
pub struct Start {
    /// The checkpoint to go on from; none at the beginning.
    pub saved: Option<SavedRun>,
    /// Whether the folder of checkpoints may hold some: those of this run.
    pub is_resumed: bool,
    /// The ranks that the launcher has started; this process alone if there is none.
    pub comm: Option<Communicator>,
    /// Whether SIGINT, SIGTERM and SIGHUP end a run after a step, which is saved if it has checkpoints. They are the process's from the
    /// first step on.
    pub listens: bool,
    /// Whether what only evaluates may compute in f32 where the device lacks the precision that it was given.
    pub may_widen: bool,
}

/// Trains as `config` says on `device`, which is `selected`, and writes the log to `out`.
///
/// The backend's default FP8 config is switched off for `device`: only linears that `config` names run in FP8. With
/// `float8.strict`, a GEMM in high precision that `config` does not ask for is [`TrainError::Strict`], after the first step in
/// FP8 or at the end.
///
/// # Errors
/// Any [`Error`].
pub fn train<B: AutodiffBackend + Float8Stack<Inner: ShardBackend>>(
    config: &RunConfig,
    start: &Start,
    selected: &SelectedDevice,
    device: &B::Device,
    out: &mut dyn Write,
) -> Result<Outcome, Error> {
    config.validate()?;
    let comm = start.comm.clone().unwrap_or_else(Communicator::solo);
    comm.agree("the program", &program(&comm))?;
    comm.agree("configuration", &config.to_toml()?)?;
    let is_first = comm.rank() == 0;
    let progress = if is_first { ProgressLine::new() } else { ProgressLine::hidden() };
    let out = &mut Log::new(out, &progress);
    if let Some(path) = &config.training.report {
        check_report_path(path)?;
    }
    let text = config.text()?;
    let samples = config.generate.max_new_tokens > 0;
    let prompt = |is_chat| match samples {
        true => text.prompt(&config.generate.prompt, is_chat).map(|prompt| Some(prompt.len())),
        false => Ok(None),
    };
    // Only the data says which of them it is to be.
    let (plain, chat) = (prompt(false)?, prompt(true));
    let longest = plain.max(chat.as_ref().ok().copied().flatten());
    let dims = dimensions(config, &text.tokenizer, Some(config.training.seq_len), longest)?;
    // Before anything touches the device.
    let done = start.saved.as_ref().map_or(0, |saved| saved.step());
    let profile = config.profile.as_ref().filter(|profile| profile.last() > done);
    let profiler = profile.map(|profile| Profiler::prepare::<B>(profile, selected, device)).transpose()?;
    let dtype = compute_dtype::<B>(config, selected, device)?;
    announce::model(config, selected, dtype, &dims, &text.tokenizer, out)?;
    let weights = Weights::open(config, start.saved.as_ref(), dims.clone());
    let weights = all_or_none(&comm, "the weights", weights)?;
    let plan = memory::plan::<B>(config, dims, comm.world_size(), dtype, device)?;
    all_or_none(&comm, "the memory", memory::announce(&plan, selected, out))?;
    let checkpoints = match is_first {
        true => Checkpoints::new(&config.checkpoint, config.to_toml()?, !start.is_resumed, |folder| {
            config.copy_assets(folder)
        }),
        false => Ok(Checkpoints::of_another(&config.checkpoint)),
    };
    let checkpoints = all_or_none(&comm, "the folder of checkpoints", checkpoints)?;
    let checkpoints = checkpoints.map(|checkpoints| checkpoints.with_ranks(comm.clone()));
    // A file that is asked for may be one of several runs, so that nothing of it is replaced.
    let asked = config.training.metrics.as_deref().filter(|_| is_first).map(Metrics::append).transpose();
    let asked = all_or_none(&comm, "the file of metrics", asked.map_err(Error::from))?;
    let data = all_or_none(&comm, "the data", config.open_data(&text, &progress, out))?;
    comm.agree("the data", &data.fingerprints())?;
    let (held_out, batches) = (config.held_out_batches(&data)?, config.train_batches(&data)?);
    announce::data(config, &data, &batches, comm.world_size(), out)?;
    let is_chat = data.has_conversations() && samples;
    if is_chat {
        // A template that refuses it does so before the steps.
        chat?;
    }
    let config = &config.with_steps(&batches, comm.world_size())?;
    let steps = config.training.steps;
    require("training.steps", steps, done <= steps.get(), &format!("the checkpoint is of step {done}"))?;
    let resolved = config.to_toml()?;
    let checkpoints = checkpoints.map(|checkpoints| checkpoints.with_config(resolved));

    let model = all_or_none(&comm, "the model", prepare::<B>(config, weights, device, &progress, out))?;
    let model = model.with_compute_dtype(dtype);
    let (model, ranks) = shard::<B>(config, model, &comm, out)?;
    let mut steps = Steps::new(config.steps(), model, batches).with_ranks(ranks);
    if let Some(saved) = &start.saved {
        steps = steps.resume(saved)?;
        writeln!(out, "resumed: step {} of {}", saved.step(), saved.path().display())?;
    }
    let signals = match start.listens {
        true => Signals::listen().map_err(TrainError::Signals)?,
        false => Signals::default(),
    };
    // A new run replaces what is in its folder.
    let open_metrics = if start.is_resumed { Metrics::append } else { Metrics::create };
    let own = config.metrics_file().filter(|_| is_first && asked.is_none());
    let own = own.map(|path| open_metrics(&path)).transpose().map_err(Error::from);
    let metrics = asked.or(all_or_none(&comm, "the file of metrics", own)?);
    let held_out = &held_out;
    let run = Run {
        config: config.steps(),
        selected,
        device,
        held_out,
        checkpoints,
        profiler,
        metrics,
        signals,
        progress,
        out,
    };
    finish(config, &text, is_chat, run, steps)
}

/// The digest of this program's file, which every rank has to run. Alone it need not be read.
fn program(comm: &Communicator) -> String {
    let version = || format!("version {}", env!("CARGO_PKG_VERSION"));
    let file = || digest_of_file(&std::env::current_exe()?);
    if comm.world_size() == 1 { version() } else { file().unwrap_or_else(|_| version()) }
}

/// `result`; where it is another rank's that failed, an error that tells its error.
fn all_or_none<T>(comm: &Communicator, what: &str, result: Result<T, Error>) -> Result<T, Error> {
    let told = comm.all_ok(what, result.as_ref().map(drop).map_err(|error| chain(error)));
    let value = result?;
    told?;
    Ok(value)
}

/// An error and what caused it, in a line.
fn chain(error: &dyn std::error::Error) -> String {
    let causes = std::iter::successors(error.source(), |error| error.source());
    causes.fold(error.to_string(), |line, cause| format!("{line}: {cause}"))
}

/// Makes the steps of `config` that are left, then evaluates, samples and reports as [`train()`] does. The sample of a run on
/// conversations, which `is_chat` says, is the answer to a user.
///
/// # Errors
/// As [`train()`].
pub fn finish<B: AutodiffBackend + Float8Stack>(
    config: &RunConfig,
    text: &Text,
    is_chat: bool,
    mut run: Run<'_, B>,
    steps: Steps<'_, B, Llama<B>>,
) -> Result<Outcome, Error> {
    let is_first = steps.ranks().is_none_or(Ranks::is_first);
    let Finished { model, lines, held_out: judged, report } = run.run(steps)?;
    let Run { held_out, out, progress, .. } = run;
    if let Some(HeldOut { last: (_, loss), best }) = judged {
        announce::held_out(loss, held_out, out)?;
        if best.1 < loss {
            writeln!(out, "best held-out loss: {:.5}  (step {})", best.1, best.0)?;
        }
    }
    let sample = sample(config, text, is_chat, &model.valid())?;
    if !sample.is_empty() {
        let (prompt, between) = (&config.generate.prompt, if is_chat { "\n" } else { "" });
        writeln!(out, "sample:\n{prompt}{between}{sample}")?;
    }
    let report = report.unwrap_or_else(|| report_of::<B, _>(&model));
    if let Some(path) = config.training.report.as_ref().filter(|_| is_first) {
        write_report(&report, path)?;
        writeln!(out, "report: {}", path.display())?;
    }
    let gemms = report.totals();
    // The report's last line is the totals, unless there is nothing to report.
    let is_fp8 = config.training.precision == Precision::Fp8;
    if config.training.print_report || is_fp8 && report.layers.is_empty() {
        writeln!(out, "{report}")?;
    } else if is_fp8 {
        writeln!(out, "{gemms}")?;
    }
    verify::<B, _>(&config.float8, &model)?;
    progress.check_log().map_err(TrainError::Output)?;
    let (held_out_loss, best_held_out_loss) = (judged.map(|judged| judged.last.1), judged.map(|judged| judged.best));
    Ok(Outcome { steps: lines, held_out_loss, best_held_out_loss, sample, gemms, report })
}

/// The model's dimensions, with rotary tables no longer than what is to be done needs: sequences of `seq_len`, and text after a prompt of
/// so many tokens.
pub(crate) fn dimensions(
    config: &RunConfig,
    tokenizer: &Tokenizer,
    seq_len: Option<usize>,
    prompt: Option<usize>,
) -> Result<LlamaConfig, Error> {
    let mut dims = config.llama()?;
    let needed = tokenizer.vocab_size();
    if dims.vocab_size < needed {
        return Err(Error::Vocabulary { vocab_size: dims.vocab_size, needed });
    }
    let max_seq_len = dims.max_seq_len;
    if let Some(seq_len) = seq_len {
        let reason = format!("the model has {max_seq_len} positions");
        require("training.seq_len", seq_len, seq_len <= max_seq_len, &reason)?;
    }
    let new = config.generate.max_new_tokens;
    let generated = prompt.map_or(0, |prompt| prompt.saturating_add(new));
    if let Some(prompt) = prompt {
        let reason = format!("with a prompt of {prompt} tokens exceeds the model's {max_seq_len} positions");
        require("generate.max_new_tokens", new, generated <= max_seq_len, &reason)?;
    }
    dims.max_seq_len = generated.max(seq_len.unwrap_or(1)).max(1);
    Ok(dims)
}

pub(crate) fn compute_dtype<B: Backend>(
    config: &RunConfig,
    selected: &SelectedDevice,
    device: &B::Device,
) -> Result<DType, Error> {
    let training = &config.training;
    let implied = match (training.precision, selected) {
        (Precision::F32, _) => ComputeDtype::F32,
        (Precision::Bf16, _) | (Precision::Fp8, SelectedDevice::Cuda) => ComputeDtype::Bf16,
        (Precision::Fp8, _) => ComputeDtype::F32,
    };
    let chosen = training.compute_dtype.unwrap_or(implied);
    if training.precision != Precision::Fp8 && chosen != implied {
        let reason = format!("precision {:?} computes in {implied:?}", training.precision).to_lowercase();
        let value = format!("{chosen:?}").to_lowercase();
        return Err(ConfigError::Value { key: "training.compute_dtype", value, reason }.into());
    }
    let dtype = match chosen {
        ComputeDtype::F32 => DType::F32,
        ComputeDtype::Bf16 => DType::BF16,
    };
    if B::supports_dtype(device, dtype) {
        return Ok(dtype);
    }
    Err(Error::UnsupportedDtype { dtype: format!("{dtype:?}").to_lowercase(), device: selected.to_string() })
}

/// A model with these weights, with FP8 applied if `config` asks for it.
///
/// The backend's default FP8 config is switched off for `device`.
///
/// # Errors
/// Weights that do not load, an FP8 config that does not fit the model, a log that cannot be written.
pub fn prepare<B: AutodiffBackend + Float8Stack>(
    config: &RunConfig,
    weights: Weights<'_>,
    device: &B::Device,
    progress: &ProgressLine,
    out: &mut dyn Write,
) -> Result<Llama<B>, Error> {
    let model = weights.load::<B>(device, progress, out)?;
    let float8 = config.float8(model.config());
    set_default_config::<B>(device, None)?;
    if config.training.precision != Precision::Fp8 {
        return Ok(model);
    }
    // Strict mode panics in the GEMM; a run reports an error instead.
    let (model, summary) = float8.with_strict(false).apply::<B, _>(model).map_err(Float8Error::from)?;
    writeln!(out, "{summary}")?;
    Ok(model)
}

/// A model of which each rank keeps its rows, where there are several.
fn shard<B: AutodiffBackend + Float8Stack<Inner: ShardBackend>>(
    config: &RunConfig,
    model: Llama<B>,
    comm: &Communicator,
    out: &mut dyn Write,
) -> Result<(Llama<B>, Option<Ranks>), Error> {
    if comm.world_size() == 1 {
        return Ok((model, None));
    }
    let (model, sharded) =
        Sharded::apply::<B, _>(model, comm, memory::shard_config(config)).map_err(ShardError::from)?;
    writeln!(out, "{}", sharded.summary())?;
    let ranks = Ranks::new::<B, _>(sharded, &model);
    Ok((model, Some(ranks)))
}

fn sample<B: Backend>(config: &RunConfig, text: &Text, is_chat: bool, model: &Llama<B>) -> Result<String, Error> {
    if config.generate.max_new_tokens == 0 {
        return Ok(String::new());
    }
    let prompt = text.prompt(&config.generate.prompt, is_chat)?;
    let choices = text.tokenizer.num_choices();
    let tokens = model.generate(&prompt, config.generate.max_new_tokens, choices, &text.stop(), sampling(config))?;
    Ok(text.tokenizer.stream_text_after(&prompt)?.read(&tokens)?)
}

/// How the configuration has text sampled.
pub(crate) fn sampling(config: &RunConfig) -> Sampling {
    match config.generate.temperature {
        0.0 => Sampling::Greedy,
        temperature => Sampling::Temperature { temperature, seed: config.training.seed },
    }
}
