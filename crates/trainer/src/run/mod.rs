//! The training loop: batches in, step lines, metrics and checkpoints out.

mod loss_reader;

use std::io::Write;
use std::time::Instant;

use anyhow::Result;
use burn::module::AutodiffModule;
use burn::tensor::backend::{AutodiffBackend, Backend};
use burn_float8::{Float8Stack, Report, report::NonFiniteOperand};
use device_select::SelectedDevice;
use loss_reader::{Seen, Watch, scalar};

use crate::RunError;
use crate::activation_checkpoint::{CheckpointingPlan, loss};
use crate::batches::Batch;
use crate::checkpoint::{CheckpointKind, Checkpoints, NotFinite, Snapshot, Written, saved_steps};
use crate::config::{Float8Section, Precision, TrainingSection};
use crate::error::Divergence;
use crate::metrics::{Memory, Metrics, Peak, StepLine, better};
use crate::model::LanguageModel;
use crate::profile::Profiler;
use crate::progress::ProgressLine;
use crate::ranks::Ranks;
use crate::report::{Calls, add_calls, report_of, without_calls};
use crate::signals::Signals;
use crate::steps::{Step, StepConfig, Steps};

/// Environment of a run.
pub struct Run<'a, B: AutodiffBackend> {
    /// Sections that determine a step.
    pub config: StepConfig<'a>,
    /// Device as selected by the user.
    pub selected: &'a SelectedDevice,
    /// Device of the backend.
    pub device: &'a B::Device,
    /// Batches of the validation loss; if empty, it is not computed.
    pub held_out: &'a [Batch],
    /// Checkpoints, if saved.
    pub checkpoints: Option<Checkpoints>,
    /// Profiler of some steps, if configured.
    pub profiler: Option<Profiler>,
    /// Metrics file, if configured.
    pub metrics: Option<Metrics>,
    /// Signals, polled between steps.
    pub signals: Signals,
    /// Progress line.
    pub progress: ProgressLine,
    /// Log.
    pub out: &'a mut dyn Write,
}

/// Results of a run.
#[derive(Debug)]
pub struct Finished<M> {
    /// Trained model.
    pub model: M,
    /// Step lines.
    pub lines: Vec<StepLine>,
    /// Losses of the validation batches, if there are any.
    pub held_out: Option<HeldOut>,
    /// Report of the linears, without evaluation; `None` if no step was run.
    pub report: Option<Report>,
}

/// Mean losses of the validation batches, in nats per token.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct HeldOut {
    /// Latest loss and its step.
    pub last: (usize, f64),
    /// Smallest loss and its step.
    pub best: (usize, f64),
}

impl HeldOut {
    /// Adds a loss.
    fn and(so_far: Option<Self>, last: (usize, f64)) -> Self {
        Self { last, best: so_far.map_or(last, |so_far| better(so_far.best, last)) }
    }
}

/// State of a run between steps.
struct UnderWay<B: AutodiffBackend> {
    watch: Watch<B>,
    lines: Vec<StepLine>,
    held_out: Option<HeldOut>,
    /// GEMM calls of evaluations.
    evaluated: Calls,
    /// Report of the linears in all steps, set after the last one.
    report: Option<Report>,
    /// Time of the last line, and tokens since.
    since: Instant,
    tokens: usize,
    flops_per_token: f64,
    /// Total peak of the devices of all ranks.
    peak: Option<Peak>,
}

impl<B: AutodiffBackend + Float8Stack> Run<'_, B> {
    /// Runs the remaining steps and evaluates.
    ///
    /// # Errors
    /// Any [`RunError`]; errors of checkpoints, of other files, of the profiler and of the device.
    pub fn run<M>(&mut self, steps: Steps<'_, B, M>) -> Result<Finished<M>>
    where
        M: LanguageModel<B> + AutodiffModule<B, InnerModule: LanguageModel<B::InnerBackend>>,
    {
        self.progress.begin_steps(steps.done(), self.config.training.steps.get());
        let finished = self.make(steps);
        self.progress.end();
        if let (Err(error), Some(metrics)) = (&finished, &mut self.metrics)
            && let Some(NotFinite { step, .. }) = error.downcast_ref()
        {
            // Keeps the first error if the metrics cannot be written either.
            let _ = metrics.diverged(*step, None, error.to_string());
        }
        finished
    }

    fn make<M>(&mut self, mut steps: Steps<'_, B, M>) -> Result<Finished<M>>
    where
        M: LanguageModel<B> + AutodiffModule<B, InnerModule: LanguageModel<B::InnerBackend>>,
    {
        self.checkpoints.as_ref().map_or(Ok(()), |checkpoints| checkpoints.begin(steps.done()))?;
        let training = self.config.training;
        let fp8 = training.precision == Precision::Fp8;
        let held_out = match &mut self.metrics {
            Some(metrics) => metrics.begin(steps.done(), self.config, self.selected, self.out)?,
            None => None,
        };
        let mut now = UnderWay {
            watch: Watch::new(),
            lines: Vec::new(),
            held_out: held_out.map(|best| HeldOut { last: best, best }),
            evaluated: Calls::default(),
            report: None,
            since: Instant::now(),
            tokens: 0,
            flops_per_token: steps.model.flops_per_token(training.seq_len),
            peak: self
                .selected
                .hardware_name()
                .and_then(|name| Peak::of_devices(&name, steps.ranks().map_or(1, Ranks::count))),
        };
        let mut was_float8 = fp8 && (steps.done() == 0 || self.is_float8(steps.done() - 1));
        let mut verified = false;
        let begun = steps.done();
        while steps.done() < training.steps.get() {
            if let Some(profiler) = &mut self.profiler {
                profiler.before_step::<B>(steps.done() + 1, self.device)?;
            }
            let epochs = steps.batches.epochs();
            let step = steps.step(self.device)?;
            let number = step.number;
            let table = self.profiler.as_mut().map(|profiler| profiler.after_step::<B>(number, self.device));
            if let Some(table) = table.transpose()?.flatten() {
                writeln!(self.out, "{table}")?;
            }
            if let Some(epochs) = steps.batches.epochs().filter(|now| Some(*now) > epochs) {
                let borrowed = match steps.batches.of_epoch() {
                    0 => String::new(),
                    next => format!("; sequences of the next one in this step: {next}"),
                };
                writeln!(self.out, "step: {number:2}  epoch {epochs} has ended{borrowed}")?;
            }
            now.tokens += step.tokens;
            now.watch.push(&step);
            if step.is_float8 != was_float8 {
                let precision = if step.is_float8 { "FP8" } else { "high precision" };
                writeln!(self.out, "step: {number:2}  linears switch to {precision} (float8.schedule)")?;
                was_float8 = step.is_float8;
            }
            if step.is_float8 && !verified {
                verify::<B, M>(self.config.float8, &steps.model)?;
                verified = true;
            }
            // An unwritable log stops the run like SIGINT.
            let lost = self.progress.has_failed().then_some("a log that cannot be written");
            let stop = match (self.signals.stop().or(lost), steps.ranks()) {
                (stop, Some(ranks)) if self.checkpoints.is_some() => ranks.stop(stop)?,
                (stop, _) => stop,
            };
            let save =
                self.checkpoints.as_ref().is_some_and(|c| stop.is_some() || c.is_due(number, training.steps.get()));
            let log = number == 1 || number == training.steps.get() || number.is_multiple_of(training.log_every);
            let evaluate =
                number == training.steps.get() || training.eval_every > 0 && number.is_multiple_of(training.eval_every);
            // A CPU has already computed the step. Ranks have waited for it, and must end together.
            let is_there = *self.selected == SelectedDevice::Cpu || steps.ranks().is_some();
            let seen = match log || save || evaluate || is_there || stop.is_some() {
                true => Some(now.watch.wait(number)?),
                false => now.watch.poll()?,
            };
            let rest = now.watch.take().into_iter().filter(|seen| !log || seen.step < number);
            if let Some(metrics) = &mut self.metrics {
                rest.into_iter().try_for_each(|seen| metrics.seen(seen.step, seen.loss, seen.grad_norm, seen.lr))?;
            }
            if let Some(seen) = seen.filter(|seen| !seen.is_finite()) {
                return Err(self.diverged(&steps, seen, now.watch.cause(seen.step)));
            }
            self.progress.set_step(number, seen.map(|seen| seen.loss));
            if let Some(seen) = seen.filter(|_| log) {
                self.log(&mut now, &step, seen, &steps)?;
            }
            if number == training.steps.get() {
                now.report = Some(without_calls(report_of::<B, M>(&steps.model), &now.evaluated));
            }
            if save || evaluate {
                let held_out = self.evaluate(&mut now, &steps)?;
                if save {
                    self.write(&steps, CheckpointKind::ValidationLoss(held_out.map(|held_out| held_out.last.1)))?;
                }
            }
            if let Some(signal) = stop {
                let written = self.checkpoints.as_mut().map(Checkpoints::finish).transpose()?.flatten();
                self.announce(written)?;
                let folder = self.checkpoints.as_ref().map(|checkpoints| checkpoints.path().to_path_buf());
                return Err(RunError::Interrupted { signal, step: number, folder }.into());
            }
            let written = self.checkpoints.as_mut().map(Checkpoints::poll).transpose()?.flatten();
            self.announce(written)?;
        }
        let written = self.checkpoints.as_mut().map(Checkpoints::finish).transpose()?.flatten();
        self.announce(written)?;
        // Only the first rank has the metrics with earlier losses.
        let is_known = steps.ranks().is_none() || steps.done() > begun;
        let held_out = match now.held_out.filter(|held_out| is_known && held_out.last.0 == steps.done()) {
            Some(held_out) => Some(held_out),
            // No step was left.
            None => self.evaluate(&mut now, &steps)?,
        };
        Ok(Finished { model: steps.model.into_inner(), lines: now.lines, held_out, report: now.report })
    }

    /// Writes the step line to the log and the metrics.
    fn log<M>(&mut self, now: &mut UnderWay<B>, step: &Step<B>, seen: Seen, steps: &Steps<'_, B, M>) -> Result<()>
    where
        M: LanguageModel<B> + AutodiffModule<B>,
    {
        let memory = match self.selected {
            SelectedDevice::Cpu => Memory::of_process(),
            _ => B::device_memory(self.device).map(|memory| Memory { bytes: memory.reserved, total: None }),
        };
        let line = StepLine {
            step: seen.step,
            loss: seen.loss,
            grad_norm: seen.grad_norm,
            lr: step.lr,
            memory,
            tokens_per_second: now.tokens as f64 / now.since.elapsed().as_secs_f64(),
            flops_per_token: now.flops_per_token,
            peak: now.peak,
        };
        writeln!(self.out, "{line}")?;
        if let Some(metrics) = &mut self.metrics {
            metrics.step(&line, steps.monitor())?;
        }
        now.lines.push(line);
        (now.since, now.tokens) = (Instant::now(), 0);
        Ok(())
    }

    /// Computes the validation loss after the current step, if anything is held out.
    fn evaluate<M>(&mut self, now: &mut UnderWay<B>, steps: &Steps<'_, B, M>) -> Result<Option<HeldOut>>
    where
        M: LanguageModel<B> + AutodiffModule<B, InnerModule: LanguageModel<B::InnerBackend>>,
    {
        if self.held_out.is_empty() {
            return Ok(None);
        }
        let begun = Instant::now();
        let done = steps.done();
        let before = steps.monitor().calls();
        let loss = mean_loss(&steps.model.valid(), self.held_out, self.config.training, self.device)?;
        add_calls(&mut now.evaluated, &before, steps.monitor().calls());
        if !loss.is_finite() {
            let error = RunError::HeldOutDiverged { steps: done, loss };
            self.metrics.as_mut().map_or(Ok(()), |m| m.diverged(done, None, error.to_string()))?;
            self.keep_diverged(steps)?;
            return Err(error.into());
        }
        let held_out = HeldOut::and(now.held_out, (done, loss));
        if let Some(metrics) = &mut self.metrics {
            metrics.held_out(done, loss)?;
        }
        // The last one is printed at the end of the run.
        if done < self.config.training.steps.get() {
            let (best_step, best) = held_out.best;
            writeln!(self.out, "step: {done:2}  validation loss: {loss:8.5}  best: {best:8.5} (step {best_step})")?;
        }
        now.held_out = Some(held_out);
        // Excludes evaluation from tokens per second.
        now.since += begun.elapsed();
        Ok(Some(held_out))
    }

    fn is_float8(&self, step: usize) -> bool {
        self.config.float8.is_float8(step, self.config.training.steps.get())
    }

    fn write<M>(&mut self, steps: &Steps<'_, B, M>, kind: CheckpointKind) -> Result<()>
    where
        M: LanguageModel<B> + AutodiffModule<B>,
    {
        let Some(checkpoints) = &mut self.checkpoints else { return Ok(()) };
        let position = steps.batches.position();
        let snapshot = Snapshot::of::<B, M>(&steps.model, &steps.optimizer, steps.done(), position, steps.ranks());
        let written = checkpoints.save(snapshot, kind)?;
        self.announce(written)
    }

    fn announce(&mut self, written: impl IntoIterator<Item = Written>) -> Result<()> {
        for Written { step, kind, took } in written {
            let what = if kind == CheckpointKind::Diverged { "  diverged, kept to look at" } else { "" };
            writeln!(self.out, "step: {step:2}  saved in {:.2} s{what}", took.as_secs_f64())?;
        }
        Ok(())
    }

    /// Error of a diverged run. The diverged state is saved next to its checkpoints.
    fn diverged<M>(&mut self, steps: &Steps<'_, B, M>, seen: Seen, cause: Option<NonFiniteOperand>) -> anyhow::Error
    where
        M: LanguageModel<B> + AutodiffModule<B>,
    {
        let Seen { step, loss, grad_norm, .. } = seen;
        let mut error = Divergence { step, loss, grad_norm, cause, saved: vec![], folder: None };
        let noted =
            self.metrics.as_mut().map_or(Ok(()), |m| m.diverged(step, Some([loss, grad_norm]), error.to_string()));
        if let Err(error) = noted.and_then(|()| self.keep_diverged(steps)) {
            return error;
        }
        error.folder = self.checkpoints.as_ref().map(|checkpoints| checkpoints.path().to_path_buf());
        error.saved = error.folder.as_deref().map_or(vec![], |folder| saved_steps(folder).unwrap_or_default());
        RunError::Diverged(Box::new(error)).into()
    }

    fn keep_diverged<M>(&mut self, steps: &Steps<'_, B, M>) -> Result<()>
    where
        M: LanguageModel<B> + AutodiffModule<B>,
    {
        self.write(steps, CheckpointKind::Diverged)?;
        let written = self.checkpoints.as_mut().map(Checkpoints::finish).transpose()?.flatten();
        self.announce(written)
    }
}

/// With `float8.strict`, checks that every selected GEMM ran in FP8.
///
/// # Errors
/// [`RunError::Strict`].
pub fn verify<B: Float8Stack, M: burn::module::Module<B>>(float8: &Float8Section, model: &M) -> Result<()> {
    match float8.config.strict {
        true => report_of::<B, M>(model).verify().map_err(|error| RunError::Strict(error).into()),
        false => Ok(()),
    }
}

/// Mean loss in nats per target over `batches`, with logits of `training.loss_chunk` tokens at a
/// time.
///
/// # Errors
/// A device that fails.
pub fn mean_loss<B: Backend, M: LanguageModel<B>>(
    model: &M,
    batches: &[Batch],
    training: &TrainingSection,
    device: &B::Device,
) -> Result<f64> {
    let plan = CheckpointingPlan::new(training, model.vocab_size());
    let (mut sum, mut targets) = (0.0, 0);
    for batch in batches {
        sum += scalar(loss(model, batch, plan, device))? * batch.num_targets() as f64;
        targets += batch.num_targets();
    }
    Ok(sum / targets.max(1) as f64)
}
