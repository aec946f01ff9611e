//! A run from its configuration to its end: data, model, steps, then a held-out loss, a sample and what the linears did.

use std::io::Write;

use burn::module::AutodiffModule;
use burn::tensor::DType;
use burn::tensor::backend::{AutodiffBackend, Backend};
use burn_float8::{Float8Error, Float8Stack, Report, report::GemmTotals, set_default_config};
use device_select::SelectedDevice;
use float8_shard::{Communicator, Reshard, ShardBackend, ShardConfig, ShardError, ShardPlan, Sharded};
use train::batches::Batch;
use train::checkpoint::{Checkpoints, SavedRun};
use train::config::{ComputeDtype, ConfigError, ParallelismSection, Precision, require};
use train::data::DatasetSize;
use train::metrics::{Metrics, StepLine, thousands};
use train::profile::Profiler;
use train::run::{Finished, HeldOut, verify};
use train::{
    Dataset, Log, ProgressLine, Ranks, Run, Signals, Steps, Tokenizer, TrainError, check_report_path, digest_of_file,
    report_of, write_report,
};

use crate::Error;
use crate::config::LlamaConfig;
use crate::generate::Sampling;
use crate::model::Llama;
use crate::run_config::RunConfig;

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
    /// GEMMs of linears by precision, evaluation and sampling included.
    pub gemms: GemmTotals,
    /// What each linear did; empty unless FP8 was applied.
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
    /// Whether SIGINT and SIGTERM end a run with checkpoints after a step, and save it. They are the process's from the first step on.
    pub listens: bool,
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
    let tokenizer = config.tokenizer()?;
    let prompt = tokenizer.prompt(&config.generate.prompt)?;
    let dims = dimensions(config, &tokenizer, Some(config.training.seq_len), Some(prompt.len()))?;
    // Before anything touches the device.
    let done = start.saved.as_ref().map_or(0, |saved| saved.step());
    let profile = config.profile.as_ref().filter(|profile| profile.last() > done);
    let profiler = profile.map(|profile| Profiler::prepare::<B>(profile, selected, device)).transpose()?;
    let dtype = compute_dtype::<B>(config, selected, device)?;
    if comm.world_size() > 1 {
        writeln!(out, "{}", plan::<B>(config, dims.clone(), comm.world_size(), dtype, device)?)?;
    }
    let checkpoints = match is_first {
        true => Checkpoints::new(&config.checkpoint, config.to_toml()?, !start.is_resumed, |folder| {
            config.copy_assets(folder)
        }),
        false => Ok(Checkpoints::of_another(&config.checkpoint)),
    };
    let checkpoints = all_or_none(&comm, "the folder of checkpoints", checkpoints)?;
    let checkpoints = checkpoints.map(|checkpoints| checkpoints.with_ranks(comm.clone()));
    let data = all_or_none(&comm, "the data", config.open_data(&tokenizer, &progress, out))?;
    comm.agree("the data", &data.fingerprints())?;
    let (held_out, batches) = (config.held_out_batches(&data)?, config.train_batches(&data)?);
    announce(config, selected, dtype, &dims, &tokenizer, &data, out)?;

    let saved = start.saved.as_ref();
    let model = all_or_none(&comm, "the model", prepare::<B>(config, saved, dims, device, &progress, out))?;
    let model = model.with_compute_dtype(dtype);
    let (model, ranks) = shard::<B>(config, model, &comm, out)?;
    let mut steps = Steps::new(config.steps(), model, batches).with_ranks(ranks);
    if let Some(saved) = saved {
        steps = steps.resume(saved)?;
        writeln!(out, "resumed: step {} of {}", saved.step(), saved.path().display())?;
    }
    let signals = match start.listens && checkpoints.is_some() {
        true => Signals::listen().map_err(TrainError::Signals)?,
        false => Signals::default(),
    };
    let metrics = config.metrics_file().filter(|_| is_first).map(|path| Metrics::append(&path)).transpose();
    let metrics = all_or_none(&comm, "the file of metrics", metrics.map_err(Error::from))?;
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
    finish(config, &tokenizer, run, steps)
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

/// Makes the steps of `config` that are left, then evaluates, samples and reports as [`train()`] does.
///
/// # Errors
/// As [`train()`].
pub fn finish<B: AutodiffBackend + Float8Stack>(
    config: &RunConfig,
    tokenizer: &Tokenizer,
    mut run: Run<'_, B>,
    steps: Steps<'_, B, Llama<B>>,
) -> Result<Outcome, Error> {
    let is_first = steps.ranks().is_none_or(Ranks::is_first);
    let Finished { model, lines, held_out: judged } = run.run(steps)?;
    let Run { held_out, out, .. } = run;
    if let Some(HeldOut { last: (_, loss), best }) = judged {
        announce_held_out(loss, held_out, out)?;
        if best.1 < loss {
            writeln!(out, "best held-out loss: {:.5}  (step {})", best.1, best.0)?;
        }
    }
    let sample = sample(config, tokenizer, &model.valid())?;
    if !sample.is_empty() {
        writeln!(out, "sample:\n{}{sample}", config.generate.prompt)?;
    }
    let report = report_of::<B, _>(&model);
    if let Some(path) = config.training.report.as_ref().filter(|_| is_first) {
        write_report(&report, path)?;
        writeln!(out, "report: {}", path.display())?;
    }
    let gemms = report.totals();
    // The report's last line is the totals, unless there is nothing to report.
    match config.training.print_report || report.layers.is_empty() {
        true => writeln!(out, "{report}")?,
        false => writeln!(out, "{gemms}")?,
    }
    verify::<B, _>(&config.float8, &model)?;
    let (held_out_loss, best_held_out_loss) = (judged.map(|judged| judged.last.1), judged.map(|judged| judged.best));
    Ok(Outcome { steps: lines, held_out_loss, best_held_out_loss, sample, gemms, report })
}

pub(crate) fn announce_held_out(loss: f64, held_out: &[Batch], out: &mut dyn Write) -> Result<(), Error> {
    let tokens: usize = held_out.iter().map(Batch::num_targets).sum();
    Ok(writeln!(out, "held-out loss: {loss:.5}  ({} tokens)", thousands(&tokens.to_string()))?)
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

fn announce(
    config: &RunConfig,
    selected: &SelectedDevice,
    dtype: DType,
    dims: &LlamaConfig,
    tokenizer: &Tokenizer,
    data: &Dataset,
    out: &mut dyn Write,
) -> Result<(), Error> {
    let count = |n: usize| thousands(&n.to_string());
    announce_device(config, selected, dtype, out)?;
    let name = match (&config.model.hf_path, &config.model.preset) {
        (Some(path), _) => path.display().to_string(),
        (None, preset) => preset.clone().unwrap_or_else(|| "debug".into()),
    };
    write!(out, "model: llama3 {name}  parameters: {}", count(dims.num_params()))?;
    match dims.moe {
        Some(_) => writeln!(out, "  active: {}", count(dims.num_active_params()))?,
        None => writeln!(out)?,
    }
    // Bytes are what a preset has.
    if config.model.hf_path.is_some() || config.data.tokenizer.is_some() {
        writeln!(out, "tokenizer: {}, {} tokens", tokenizer.format(), tokenizer.vocab_size())?;
    }
    announce_data(data, out)
}

pub(crate) fn announce_device(
    config: &RunConfig,
    selected: &SelectedDevice,
    dtype: DType,
    out: &mut dyn Write,
) -> Result<(), Error> {
    let precision = format!("{:?}", config.training.precision).to_lowercase();
    let dtype = format!("{dtype:?}").to_lowercase();
    Ok(writeln!(out, "device: {selected}  precision: {precision}  compute dtype: {dtype}")?)
}

/// What is read, what of a folder is not, and how much there is.
pub(crate) fn announce_data(data: &Dataset, out: &mut dyn Write) -> Result<(), Error> {
    let DatasetSize { files, train_tokens, held_out_tokens, .. } = data.size();
    let [files, train, held_out] =
        [files as u64, train_tokens, held_out_tokens].map(|count| thousands(&count.to_string()));
    let formats: Vec<_> = data.formats().iter().map(|(format, count)| format!("{count} {format}")).collect();
    write!(out, "data: {files} files ({})", formats.join(", "))?;
    if !data.left_out().is_empty() {
        write!(out, "  left out: {}", data.left_out())?;
    }
    Ok(writeln!(out, "  tokens: {train}  held out: {held_out}")?)
}

/// The model of a run, of these dimensions, as a checkpoint has it or at its beginning, with FP8 applied if `config` asks for it.
///
/// The backend's default FP8 config is switched off for `device`.
///
/// # Errors
/// Weights that do not load, an FP8 config that does not fit the model, a log that cannot be written.
pub fn prepare<B: AutodiffBackend + Float8Stack>(
    config: &RunConfig,
    saved: Option<&SavedRun>,
    dims: LlamaConfig,
    device: &B::Device,
    progress: &ProgressLine,
    out: &mut dyn Write,
) -> Result<Llama<B>, Error> {
    let float8 = config.float8(&dims);
    let model = initial(config, saved, dims, device, progress, out)?;
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
    let (model, sharded) = Sharded::apply::<B, _>(model, comm, shard_config(config)).map_err(ShardError::from)?;
    writeln!(out, "{}", sharded.summary())?;
    let ranks = Ranks::new::<B, _>(sharded, &model);
    Ok((model, Some(ranks)))
}

fn shard_config(config: &RunConfig) -> ShardConfig {
    let ParallelismSection { reshard, reduce_dtype } = config.parallelism;
    ShardConfig { reshard, reduce_dtype }
}

/// What each of so many ranks would hold of the run of `config`; nothing of it is allocated.
///
/// # Errors
/// Those of the configuration.
pub(crate) fn plan<B: AutodiffBackend>(
    config: &RunConfig,
    dims: LlamaConfig,
    ranks: usize,
    dtype: DType,
    device: &B::Device,
) -> Result<ShardPlan, Error> {
    // A tied output gathers the table once more, in its own dtype, and keeps it until backward.
    let is_kept = config.parallelism.reshard == Reshard::AfterStep && dtype == DType::F32;
    let tied = match dims.tie_word_embeddings && ranks > 1 && !is_kept {
        true => (dims.vocab_size * dims.hidden_size * dtype.size()) as u64,
        false => 0,
    };
    let float8 = (config.training.precision == Precision::Fp8).then(|| config.float8(&dims));
    let model = Llama::<B>::new(dims, device)?;
    let plan = ShardPlan::new::<B, _>(&model, ranks, shard_config(config), float8.as_ref(), dtype)?;
    Ok(ShardPlan { gathered: plan.gathered + tied, ..plan })
}

/// The parameters of a checkpoint, or those that a run begins with.
pub(crate) fn initial<B: AutodiffBackend>(
    config: &RunConfig,
    saved: Option<&SavedRun>,
    dims: LlamaConfig,
    device: &B::Device,
    progress: &ProgressLine,
    out: &mut dyn Write,
) -> Result<Llama<B>, Error> {
    let model = Llama::<B>::new(dims, device)?;
    Ok(match (saved, &config.model.hf_path) {
        (Some(saved), _) => progress.track("loaded", out, |progress| saved.load_parameters(model, progress))??,
        (None, Some(path)) => {
            progress.track("loaded", out, |progress| model.load_hf_weights_with(path, progress))??
        }
        (None, None) => model.init_weights(config.training.seed),
    })
}

fn sample<B: Backend>(config: &RunConfig, tokenizer: &Tokenizer, model: &Llama<B>) -> Result<String, Error> {
    let prompt = tokenizer.prompt(&config.generate.prompt)?;
    let (choices, stop) = (tokenizer.num_choices(), tokenizer.stop());
    let tokens = model.generate(&prompt, config.generate.max_new_tokens, choices, stop, sampling(config))?;
    Ok(tokenizer.stream_text_after(&prompt)?.read(&tokens)?)
}

/// How the configuration has text sampled.
pub(crate) fn sampling(config: &RunConfig) -> Sampling {
    match config.generate.temperature {
        0.0 => Sampling::Greedy,
        temperature => Sampling::Temperature { temperature, seed: config.training.seed },
    }
}
