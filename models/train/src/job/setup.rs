//! Stages from the configuration to the first step: text, place, sources, data, steps.

use std::io::Write;

use burn::module::AutodiffModule;
use burn::tensor::DType;
use burn::tensor::backend::{AutodiffBackend, Backend};
use burn_float8::backend::Float8Backend;
use burn_float8::weights::read_codes;
use burn_float8::{Float8Error, Float8Stack};
use device_select::SelectedDevice;
use float8_shard::{Communicator, ShardBackend};

use super::announce;
use super::config::RunConfig;
use super::finish::{Outcome, finish_with};
use super::memory;
use super::prepare::{adapt, check_cache, check_storage, compute_dtype, dimensions, prepare, shard};
use super::text::Text;
use super::weights::Weights;
use crate::batches::{Batch, TrainBatches};
use crate::checkpoint::{Checkpoints, SavedRun};
use crate::config::require;
use crate::metrics::Metrics;
use crate::model::{CausalLm, LanguageModel, TrainableModel};
use crate::profile::Profiler;
use crate::{JobError, Log, ProgressLine, Run, Signals, Steps, TrainError, check_report_path, digest_of_file};

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
/// run in FP8. With `float8.strict`, a GEMM that unexpectedly runs in high precision is
/// [`TrainError::Strict`], after the first step in FP8 or at the end.
///
/// # Errors
/// Any [`JobError`].
pub fn train<A: TrainableModel, B: AutodiffBackend + Float8Stack<Inner: ShardBackend>>(
    config: &RunConfig<A::Section>,
    start: &Start,
    selected: &SelectedDevice,
    device: &B::Device,
    out: &mut dyn Write,
) -> Result<Outcome, JobError> {
    config.validate()?;
    let comm = start.comm.clone().unwrap_or_else(Communicator::solo);
    let is_first = comm.rank() == 0;
    let progress = if is_first { ProgressLine::new() } else { ProgressLine::hidden() };
    let out = &mut Log::new(out, &progress);
    let setup = Setup::<A, B> { config, start, selected, device, comm, progress };
    setup.agree()?;
    config.check_ranks(setup.comm.world_size())?;
    // The order matters. Errors of files and settings come before the device is used, errors of
    // memory before anything is allocated. Nothing is written before these checks.
    let text = setup.text()?;
    let place = setup.place(&text)?;
    let computed = (place.dtype, B::Inner::fp8_facts(device).attention);
    announce::model(A::NAME, config, selected, computed, &place.dims, &text.text.tokenizer, out)?;
    let Sources { weights, checkpoints, metrics } = setup.sources(&place, out)?;
    let data = setup.data(text, out)?;
    let config = &config.with_steps(&data.batches, setup.comm.world_size())?;
    announce::schedule(setup.config, config, start.saved.as_ref(), out)?;
    let resolved = config.to_toml()?;
    let (steps, done) = (config.training.steps, setup.done());
    require("training.steps", steps, done <= steps.get(), &format!("the checkpoint is of step {done}"))?;
    if done == steps.get() {
        writeln!(out, "finished: all {steps} steps are made, `--steps` asks for more")?;
    }
    let model = prepare::<A, B>(config, weights, device, &setup.progress, out);
    let model = all_or_none(&setup.comm, "the model", model)?.with_compute_dtype(place.dtype);
    let checkpoints = checkpoints.map(|checkpoints| checkpoints.with_config(resolved));
    let last = Last { setup, config, data, checkpoints, metrics, profiler: place.profiler };
    match &config.lora {
        None => {
            // FP8-only weights are frozen, so nothing could be trained.
            let codes = read_codes::<B, _>(&model).next().map(|(layer, _)| Float8Error::Fp8OnlyTrained { layer });
            codes.map_or(Ok(()), |error| Err(TrainError::from(error)))?;
            last.run(model, |model| model, out)
        }
        Some(lora) => {
            let adapted = adapt::<B, _>(lora, model, config.training.seed, start.saved.as_ref());
            let adapted = all_or_none(&last.setup.comm, "the adapters", adapted)?;
            last.run(adapted, |adapted| adapted.attached(), out)
        }
    }
}

/// Last stages: everything before the first step except the model.
struct Last<'a, A: TrainableModel, B: Backend> {
    setup: Setup<'a, A, B>,
    /// With a known number of steps.
    config: &'a RunConfig<A::Section>,
    data: Opened,
    checkpoints: Option<Checkpoints>,
    metrics: Option<Metrics>,
    profiler: Option<Profiler>,
}

impl<A: TrainableModel, B: AutodiffBackend + Float8Stack<Inner: ShardBackend>> Last<'_, A, B> {
    /// Runs the steps on a model; `made` converts it at the end.
    fn run<M>(self, model: M, made: impl FnOnce(M) -> A::Trained<B>, out: &mut dyn Write) -> Result<Outcome, JobError>
    where
        M: LanguageModel<B> + AutodiffModule<B, InnerModule: LanguageModel<B::InnerBackend>>,
    {
        let Self { setup, config, data, checkpoints, metrics, profiler } = self;
        announce::trainable(config, &model, out)?;
        let steps = setup.steps(config, model, data.batches, out)?;
        let (signals, metrics) = (setup.signals()?, setup.metrics(metrics)?);
        let run = Run {
            config: config.steps(),
            selected: setup.selected,
            device: setup.device,
            held_out: &data.held_out,
            checkpoints,
            profiler,
            metrics,
            signals,
            progress: setup.progress,
            out,
        };
        finish_with::<A, B, M>(config, &data.text, data.is_chat, run, steps, made)
    }
}

/// Stages of [`train()`].
struct Setup<'a, A: TrainableModel, B: Backend> {
    config: &'a RunConfig<A::Section>,
    start: &'a Start,
    selected: &'a SelectedDevice,
    device: &'a B::Device,
    comm: Communicator,
    progress: ProgressLine,
}

/// Tokenizer and templates, and the length of the longest form of the prompt; `None` if nothing is
/// sampled.
struct Prompted {
    text: Text,
    prompt: Option<usize>,
}

/// Dimensions, dtype and profiler.
struct Place<C> {
    dims: C,
    dtype: DType,
    profiler: Option<Profiler>,
}

/// Inputs and outputs of the run, all open.
struct Sources<'a, C> {
    weights: Weights<'a, C>,
    checkpoints: Option<Checkpoints>,
    /// File of `training.metrics`.
    metrics: Option<Metrics>,
}

/// Training and held-out data.
struct Opened {
    text: Text,
    is_chat: bool,
    held_out: Vec<Batch>,
    batches: TrainBatches,
}

impl<'a, A: TrainableModel, B: AutodiffBackend + Float8Stack<Inner: ShardBackend>> Setup<'a, A, B> {
    fn is_first(&self) -> bool {
        self.comm.rank() == 0
    }

    /// Completed steps.
    fn done(&self) -> usize {
        self.start.saved.as_ref().map_or(0, |saved| saved.step())
    }

    /// Checks that all ranks have the same program and configuration.
    fn agree(&self) -> Result<(), JobError> {
        self.comm.agree("the program", &program(&self.comm))?;
        Ok(self.comm.agree("configuration", &self.config.to_toml()?)?)
    }

    fn text(&self) -> Result<Prompted, JobError> {
        if let Some(path) = &self.config.training.report {
            check_report_path(path)?;
        }
        let text = self.config.text()?;
        if self.config.generate.max_new_tokens == 0 {
            return Ok(Prompted { text, prompt: None });
        }
        let [plain, chat] = [false, true].map(|is_chat| text.prompt(&self.config.generate.prompt, is_chat));
        // If the template refuses the prompt, only the sample fails.
        let longest = plain?.len().max(chat.map_or(0, |prompt| prompt.len()));
        Ok(Prompted { text, prompt: Some(longest) })
    }

    fn place(&self, prompted: &Prompted) -> Result<Place<A::Config>, JobError> {
        let (config, done) = (self.config, self.done());
        let dims = dimensions(config, Some(config.training.seq_len), prompted.prompt.as_slice())?;
        let profile = config.profile.as_ref().filter(|profile| profile.last() > done);
        let profiler =
            profile.map(|profile| Profiler::prepare::<B>(profile, self.selected, self.device)).transpose()?;
        let dtype = compute_dtype::<B, _>(config, self.selected, self.device)?;
        check_storage::<B, _>(config, self.selected, self.device)?;
        if prompted.prompt.is_some() {
            check_cache::<B, _>(config, self.selected, self.device)?;
        }
        Ok(Place { dims, dtype, profiler })
    }

    fn sources(&self, place: &Place<A::Config>, out: &mut dyn Write) -> Result<Sources<'a, A::Config>, JobError> {
        let (config, comm) = (self.config, &self.comm);
        let Place { dims, dtype, .. } = place;
        let weights = Weights::open(config, self.start.saved.as_ref(), dims.clone());
        let weights = all_or_none(comm, "the weights", weights)?;
        let where_to = (self.selected, self.device);
        let fits = memory::check_step::<B, A::Trained<B>>(config, dims, comm.world_size(), *dtype, where_to, out);
        all_or_none(comm, "the memory", fits)?;
        let checkpoints =
            Checkpoints::new(
                &config.checkpoint,
                comm,
                !self.start.is_resumed,
                |folder| Ok(config.copy_assets(folder)?),
            );
        let checkpoints = all_or_none(comm, "the folder of checkpoints", checkpoints.map_err(JobError::from))?;
        // Appends, because an explicitly named file may be shared by several runs.
        let metrics = config.training.metrics.as_deref().filter(|_| self.is_first()).map(Metrics::append).transpose();
        let metrics = all_or_none(comm, "the file of metrics", metrics.map_err(JobError::from))?;
        Ok(Sources { weights, checkpoints, metrics })
    }

    fn data(&self, prompted: Prompted, out: &mut dyn Write) -> Result<Opened, JobError> {
        let (config, comm) = (self.config, &self.comm);
        let text = prompted.text;
        let data = all_or_none(comm, "the data", config.open_data(&text, &self.progress, out))?;
        comm.agree("the data", &data.fingerprints())?;
        let (held_out, batches) = (config.held_out_batches(&data)?, config.train_batches(&data)?);
        announce::data(config, &data, &batches, comm.world_size(), out)?;
        let is_chat = data.has_conversations() || text.template.is_some();
        Ok(Opened { text, is_chat, held_out, batches })
    }

    /// Remaining steps of the run of `config`, whose length is known.
    fn steps<'c, M: LanguageModel<B> + AutodiffModule<B>>(
        &self,
        config: &'c RunConfig<A::Section>,
        model: M,
        batches: TrainBatches,
        out: &mut dyn Write,
    ) -> Result<Steps<'c, B, M>, JobError> {
        let comm = &self.comm;
        let (model, ranks) = shard::<B, _, _>(config, model, comm, out)?;
        let mut steps = Steps::new(config.steps(), model, batches).with_ranks(ranks);
        if let Some(saved) = &self.start.saved {
            steps = steps.resume(saved)?;
            writeln!(out, "resumed: step {} of {}", saved.step(), saved.path().display())?;
        }
        Ok(steps)
    }

    fn signals(&self) -> Result<Signals, JobError> {
        match self.start.listens {
            true => Ok(Signals::listen().map_err(TrainError::Signals)?),
            false => Ok(Signals::default()),
        }
    }

    /// Metrics file: `asked`, or the run's own.
    fn metrics(&self, asked: Option<Metrics>) -> Result<Option<Metrics>, JobError> {
        // A new run replaces the file in its folder.
        let open = if self.start.is_resumed { Metrics::append } else { Metrics::create };
        let own = self.config.metrics_file().filter(|_| self.is_first() && asked.is_none());
        let own = own.map(|path| open(&path)).transpose().map_err(JobError::from);
        Ok(asked.or(all_or_none(&self.comm, "the file of metrics", own)?))
    }
}

/// Digest of this executable, which every rank must run. A single process does not read it.
fn program(comm: &Communicator) -> String {
    let version = || format!("version {}", env!("CARGO_PKG_VERSION"));
    let file = || digest_of_file(&std::env::current_exe()?);
    if comm.world_size() == 1 { version() } else { file().unwrap_or_else(|_| version()) }
}

/// Returns `result`. If another rank failed, returns an error with its message.
fn all_or_none<T>(comm: &Communicator, what: &str, result: Result<T, JobError>) -> Result<T, JobError> {
    let told = comm.all_ok(what, result.as_ref().map(drop).map_err(|error| chain(error)));
    let value = result?;
    told?;
    Ok(value)
}

/// Error and its causes on one line.
fn chain(error: &dyn std::error::Error) -> String {
    let causes = std::iter::successors(error.source(), |error| error.source());
    causes.fold(error.to_string(), |line, cause| format!("{line}: {cause}"))
}
