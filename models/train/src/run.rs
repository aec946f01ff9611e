//! The training loop: batches in, step lines and checkpoints out.

use std::io::Write;
use std::path::Path;
use std::time::Instant;

use burn::module::AutodiffModule;
use burn::tensor::Tensor;
use burn::tensor::backend::{AutodiffBackend, Backend};
use burn_float8::Float8Stack;
use device_select::SelectedDevice;

use crate::TrainError;
use crate::batches::Batch;
use crate::checkpoint::{Checkpoints, Snapshot, Worth, Written, saved_steps};
use crate::config::{Float8Section, Precision};
use crate::metrics::{Memory, StepLine};
use crate::model::LanguageModel;
use crate::profile::Profiler;
use crate::report::report_of;
use crate::signals::Signals;
use crate::steps::{Step, StepConfig, Steps};

/// Where a run runs, and what it is in touch with.
pub struct Run<'a, B: AutodiffBackend> {
    /// What it is to do.
    pub config: StepConfig<'a>,
    /// The device, as it was asked for.
    pub selected: &'a SelectedDevice,
    /// The backend's device.
    pub device: &'a B::Device,
    /// What the held-out loss is of.
    pub held_out: &'a [Batch],
    /// Where it is saved, if it is.
    pub checkpoints: Option<Checkpoints>,
    /// Where the time of some steps goes, if that is asked for.
    pub profiler: Option<Profiler>,
    /// Asked between steps, if it is saved.
    pub signals: Signals,
    /// The log.
    pub out: &'a mut dyn Write,
}

impl<B: AutodiffBackend + Float8Stack> Run<'_, B> {
    /// Makes the steps that are left.
    ///
    /// # Errors
    /// [`TrainError::Diverged`], [`TrainError::Interrupted`], [`TrainError::Strict`], [`TrainError::Checkpoint`],
    /// [`TrainError::Execution`], [`TrainError::Output`], [`TrainError::Profile`] and [`TrainError::Write`] of its table.
    pub fn run<M>(&mut self, mut steps: Steps<'_, B, M>) -> Result<(M, Vec<StepLine>), TrainError>
    where
        M: LanguageModel<B> + AutodiffModule<B, InnerModule: LanguageModel<B::InnerBackend>>,
    {
        self.checkpoints.as_ref().map_or(Ok(()), Checkpoints::begin)?;
        let training = self.config.training;
        let fp8 = training.precision == Precision::Fp8;
        let flops_per_token = steps.model.flops_per_token(training.seq_len);
        let mut lines = Vec::new();
        let (mut since, mut tokens) = (Instant::now(), 0);
        let mut was_float8 = fp8 && (steps.done() == 0 || self.is_float8(steps.done() - 1));
        let mut verified = false;
        while steps.done() < training.steps {
            if let Some(profiler) = &mut self.profiler {
                profiler.before_step::<B>(steps.done() + 1, self.device)?;
            }
            let step;
            (steps, step) = steps.step(self.device)?;
            let Step { number, is_float8, .. } = step;
            let table = self.profiler.as_mut().map(|profiler| profiler.after_step::<B>(number, self.device));
            if let Some(table) = table.transpose()?.flatten() {
                writeln!(self.out, "{table}")?;
            }
            tokens += step.tokens;
            if is_float8 != was_float8 {
                let precision = if is_float8 { "FP8" } else { "high precision" };
                writeln!(self.out, "step: {number:2}  linears switch to {precision} (float8.schedule)")?;
                was_float8 = is_float8;
            }
            if is_float8 && !verified {
                verify::<B, M>(self.config.float8, &steps.model)?;
                verified = true;
            }
            let stop = self.checkpoints.as_ref().and_then(|_| self.signals.stop());
            let save = stop.is_some() || self.checkpoints.as_ref().is_some_and(|c| c.is_due(number, training.steps));
            let log = number == 1 || number == training.steps || number.is_multiple_of(training.log_every);
            if log || save {
                let [loss, grad_norm] = [read(step.loss)?, read(step.grad_norm)?];
                if !loss.is_finite() || !grad_norm.is_finite() {
                    return Err(self.diverged(&steps, loss, grad_norm));
                }
                if log {
                    let line = StepLine {
                        step: number,
                        loss,
                        grad_norm,
                        memory: (*self.selected == SelectedDevice::Cpu).then(Memory::of_process).flatten(),
                        tokens_per_second: tokens as f64 / since.elapsed().as_secs_f64(),
                        flops_per_token,
                        peak_flops: training.peak_tflops.map(|peak| peak * 1e12),
                    };
                    writeln!(self.out, "{line}")?;
                    lines.push(line);
                    (since, tokens) = (Instant::now(), 0);
                }
            }
            if save {
                self.save(&steps)?;
            }
            if let (Some(signal), Some(checkpoints)) = (stop, &mut self.checkpoints) {
                let written = checkpoints.finish()?;
                let folder = checkpoints.path().to_path_buf();
                self.announce(written)?;
                return Err(TrainError::Interrupted { signal, step: number, folder });
            }
            let written = self.checkpoints.as_mut().map(Checkpoints::poll).transpose()?.flatten();
            self.announce(written)?;
        }
        let written = self.checkpoints.as_mut().map(Checkpoints::finish).transpose()?.flatten();
        self.announce(written)?;
        Ok((steps.model, lines))
    }

    fn is_float8(&self, step: usize) -> bool {
        self.config.float8.is_float8(step, self.config.training.steps)
    }

    /// Saves a run whose last loss was finite, with its held-out loss.
    fn save<M>(&mut self, steps: &Steps<'_, B, M>) -> Result<(), TrainError>
    where
        M: LanguageModel<B> + AutodiffModule<B, InnerModule: LanguageModel<B::InnerBackend>>,
    {
        let loss = mean_loss(&steps.model.valid(), self.held_out, self.device)?;
        if !loss.is_finite() {
            self.keep_diverged(steps)?;
            return Err(TrainError::HeldOutDiverged { steps: steps.done(), loss });
        }
        let worth = Worth::HeldOutLoss(loss);
        self.write(steps, worth)
    }

    fn write<M>(&mut self, steps: &Steps<'_, B, M>, worth: Worth) -> Result<(), TrainError>
    where
        M: LanguageModel<B> + AutodiffModule<B>,
    {
        let Some(checkpoints) = &mut self.checkpoints else { return Ok(()) };
        let position = steps.batches.position()?;
        let snapshot = Snapshot::of::<B, M>(&steps.model, &steps.optimizer, steps.done(), position);
        let written = checkpoints.save(snapshot, worth)?;
        self.announce(written)
    }

    fn announce(&mut self, written: impl IntoIterator<Item = Written>) -> Result<(), TrainError> {
        for Written { step, worth, took } in written {
            let what = match worth {
                Worth::HeldOutLoss(loss) => format!("held-out loss: {loss:8.5}"),
                Worth::Diverged => "diverged, kept to look at".into(),
            };
            writeln!(self.out, "step: {step:2}  saved in {:.2} s  {what}", took.as_secs_f64())?;
        }
        Ok(())
    }

    /// The error of a run that has diverged. What it has come to is kept beside its checkpoints.
    fn diverged<M>(&mut self, steps: &Steps<'_, B, M>, loss: f64, grad_norm: f64) -> TrainError
    where
        M: LanguageModel<B> + AutodiffModule<B>,
    {
        if let Err(error) = self.keep_diverged(steps) {
            return error;
        }
        let folder = self.checkpoints.as_ref().map(|checkpoints| checkpoints.path().to_path_buf());
        let good = folder.as_deref().and_then(newest);
        TrainError::Diverged { step: steps.done(), loss, grad_norm, good, folder }
    }

    fn keep_diverged<M>(&mut self, steps: &Steps<'_, B, M>) -> Result<(), TrainError>
    where
        M: LanguageModel<B> + AutodiffModule<B>,
    {
        self.write(steps, Worth::Diverged)?;
        let written = self.checkpoints.as_mut().map(Checkpoints::finish).transpose()?.flatten();
        self.announce(written)
    }
}

fn newest(folder: &Path) -> Option<u64> {
    saved_steps(folder).ok()?.last().copied()
}

/// With `float8.strict`, whether all ran in FP8 that was to.
///
/// # Errors
/// [`TrainError::Strict`].
pub fn verify<B: Float8Stack, M: burn::module::Module<B>>(float8: &Float8Section, model: &M) -> Result<(), TrainError> {
    match float8.config.strict {
        true => report_of::<B, M>(model).verify().map_err(TrainError::Strict),
        false => Ok(()),
    }
}

/// Mean loss in nats per target that counts, over `batches`.
///
/// # Errors
/// [`TrainError::Execution`].
pub fn mean_loss<B: Backend, M: LanguageModel<B>>(
    model: &M,
    batches: &[Batch],
    device: &B::Device,
) -> Result<f64, TrainError> {
    let (mut sum, mut targets) = (0.0, 0);
    for batch in batches {
        sum += read(model.batch_loss(batch.tensors::<B>(device)))? * batch.num_targets() as f64;
        targets += batch.num_targets();
    }
    Ok(sum / targets.max(1) as f64)
}

fn read<B: Backend>(scalar: Tensor<B, 1>) -> Result<f64, TrainError> {
    let data = scalar
        .try_into_data()
        .map_err(|error| TrainError::Execution { doing: "reading the loss", reason: error.to_string() })?;
    Ok(data.iter::<f64>().sum())
}
