//! A run from its configuration to its first step, in stages: text, place, sources, data, steps.

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
    // In this order: what is wrong with files and settings is said before the device is touched, what it has no memory for before
    // anything is allocated, and nothing is written before all of that.
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
            // Codes alone are all frozen: there would be nothing to train.
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

/// The last stages: what is there before the first step but for the model.
struct Last<'a, A: TrainableModel, B: Backend> {
    setup: Setup<'a, A, B>,
    /// With a length that is known.
    config: &'a RunConfig<A::Section>,
    data: Opened,
    checkpoints: Option<Checkpoints>,
    metrics: Option<Metrics>,
    profiler: Option<Profiler>,
}

impl<A: TrainableModel, B: AutodiffBackend + Float8Stack<Inner: ShardBackend>> Last<'_, A, B> {
    /// Makes the steps on a model of which a [`TrainableModel`]'s is made in the end.
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

/// The stages of [`train()`].
struct Setup<'a, A: TrainableModel, B: Backend> {
    config: &'a RunConfig<A::Section>,
    start: &'a Start,
    selected: &'a SelectedDevice,
    device: &'a B::Device,
    comm: Communicator,
    progress: ProgressLine,
}

/// How text becomes tokens, and the length of the longest form of the prompt; none if nothing is sampled.
struct Prompted {
    text: Text,
    prompt: Option<usize>,
}

/// What is computed, in which dtype.
struct Place<C> {
    dims: C,
    dtype: DType,
    profiler: Option<Profiler>,
}

/// What the run begins with and what it writes to, all open.
struct Sources<'a, C> {
    weights: Weights<'a, C>,
    checkpoints: Option<Checkpoints>,
    /// The file that `training.metrics` asks for.
    metrics: Option<Metrics>,
}

/// What is trained on and judged by.
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

    /// Steps made before.
    fn done(&self) -> usize {
        self.start.saved.as_ref().map_or(0, |saved| saved.step())
    }

    /// Compares what all ranks are to do.
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
        // A template that refuses the prompt only costs the sample.
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
        let checkpoints = match self.is_first() {
            true => Checkpoints::new(&config.checkpoint, config.to_toml()?, !self.start.is_resumed, |folder| {
                config.copy_assets(folder)
            }),
            false => Ok(Checkpoints::of_another(&config.checkpoint)),
        };
        let checkpoints = all_or_none(comm, "the folder of checkpoints", checkpoints)?;
        let checkpoints = checkpoints.map(|checkpoints| checkpoints.with_ranks(comm.clone()));
        // A file that is asked for may be one of several runs, so that nothing of it is replaced.
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

    /// The steps that are left of the run of `config`, whose length is known, on a model with its weights.
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

    /// The file of metrics that is asked for, or the run's own.
    fn metrics(&self, asked: Option<Metrics>) -> Result<Option<Metrics>, JobError> {
        // A new run replaces what is in its folder.
        let open = if self.start.is_resumed { Metrics::append } else { Metrics::create };
        let own = self.config.metrics_file().filter(|_| self.is_first() && asked.is_none());
        let own = own.map(|path| open(&path)).transpose().map_err(JobError::from);
        Ok(asked.or(all_or_none(&self.comm, "the file of metrics", own)?))
    }
}

/// The digest of this program's file, which every rank has to run. Alone it need not be read.
fn program(comm: &Communicator) -> String {
    let version = || format!("version {}", env!("CARGO_PKG_VERSION"));
    let file = || digest_of_file(&std::env::current_exe()?);
    if comm.world_size() == 1 { version() } else { file().unwrap_or_else(|_| version()) }
}

/// `result`; where it is another rank's that failed, an error that tells its error.
fn all_or_none<T>(comm: &Communicator, what: &str, result: Result<T, JobError>) -> Result<T, JobError> {
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
