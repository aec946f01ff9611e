//! [`Metrics`]: writes a run's `metrics.jsonl`.

use anyhow::Context;
use std::io::Write;
use std::path::Path;

use burn_float8::{Float8Stack, Monitor};
use device_select::SelectedDevice;

use super::record::{HealthRecord, MetricsFile, Record, RunRecord, TrainRecord, read_metrics};
use super::{StepLine, better};
use crate::config::Precision;
use crate::steps::StepConfig;
use crate::{TrainError, atomic};

/// Writes a run's records.
#[derive(Debug)]
pub struct Metrics {
    file: MetricsFile,
    /// Last sampled step that was written.
    sampled: u64,
}

impl Metrics {
    /// Appends to a file, or creates it.
    ///
    /// # Errors
    /// [`TrainError::Write`].
    pub fn append(path: &Path) -> Result<Self, TrainError> {
        Ok(Self { file: MetricsFile::append(path)?, sampled: 0 })
    }

    /// Creates a file, replacing an existing one.
    ///
    /// # Errors
    /// [`TrainError::Write`].
    pub fn create(path: &Path) -> Result<Self, TrainError> {
        atomic::replace(path, b"").with_context(|| format!("cannot write {}", path.display()))?;
        Self::append(path)
    }

    /// Writes the run's record and returns its smallest held-out loss so far, with its step. A file
    /// that cannot be parsed does not stop the run; it is reported on `out`.
    pub(crate) fn begin(
        &mut self,
        done: usize,
        config: StepConfig<'_>,
        selected: &SelectedDevice,
        out: &mut dyn Write,
    ) -> Result<Option<(usize, f64)>, TrainError> {
        let precision = config.training.precision;
        let run = RunRecord {
            precision: format!("{precision:?}").to_lowercase(),
            recipe: (precision == Precision::Fp8).then(|| config.float8.config.linear.recipe().to_string()),
            device: selected.to_string(),
            steps: config.training.steps.get(),
        };
        self.file.write(&Record { step: done, run: Some(run), ..Record::default() })?;
        match read_metrics(self.file.path()) {
            Ok(records) => Ok(records.into_iter().filter_map(|r| Some((r.step, r.held_out_loss?))).reduce(better)),
            Err(error) => {
                writeln!(out, "{error}: the best held-out loss is that from here on")?;
                Ok(None)
            }
        }
    }

    /// Writes a step without a line in the log.
    pub(crate) fn seen(&mut self, step: usize, loss: f64, grad_norm: f64, lr: f64) -> Result<(), TrainError> {
        self.file.write(&Record { step, train: Some(train(loss, grad_norm, lr)), ..Record::default() })
    }

    /// Writes a step with a line in the log, and new FP8 statistics.
    pub(crate) fn step<B: Float8Stack>(&mut self, line: &StepLine, monitor: &Monitor<B>) -> Result<(), TrainError> {
        let train = TrainRecord {
            loss: line.loss,
            grad_norm: line.grad_norm,
            lr: line.lr,
            tokens_per_second: line.tokens_per_second,
            tflops: line.tokens_per_second * line.flops_per_token / 1e12,
            mfu: line.mfu().given,
            mfu_fp8: line.mfu().fp8,
            mfu_bf16: line.mfu().bf16,
            memory_bytes: line.memory.map(|memory| memory.bytes),
            gemms: monitor.gemm_calls(),
        };
        let mut record = Record { step: line.step, train: Some(train), ..Record::default() };
        let sampled = self.sampled;
        for operand in monitor.health().into_iter().filter(|operand| operand.health.step > sampled) {
            let (step, cast) = (operand.health.step, operand.health.cast);
            self.sampled = self.sampled.max(step);
            let health = HealthRecord {
                step: step as usize,
                sqnr_db: cast.sqnr_db,
                saturated: cast.saturated,
                flushed: cast.flushed,
                non_finite: cast.non_finite,
            };
            record.health.entry(operand.layer).or_default().insert(operand.operand.into(), health);
        }
        self.file.write(&record)
    }

    /// Writes that the run diverged at a step, with its loss and gradient norm if they are the
    /// cause.
    pub(crate) fn diverged(&mut self, step: usize, seen: Option<[f64; 2]>, why: String) -> Result<(), TrainError> {
        let train = seen.map(|[loss, grad_norm]| train(loss, grad_norm, f64::NAN));
        self.file.write(&Record { step, train, diverged: Some(why), ..Record::default() })
    }

    /// Writes the held-out loss after a step.
    pub(crate) fn held_out(&mut self, step: usize, loss: f64) -> Result<(), TrainError> {
        self.file.write(&Record { step, held_out_loss: Some(loss), ..Record::default() })
    }
}

/// Record of the values that every step has.
fn train(loss: f64, grad_norm: f64, lr: f64) -> TrainRecord {
    let unknown = f64::NAN;
    TrainRecord { loss, grad_norm, lr, tokens_per_second: unknown, tflops: unknown, ..TrainRecord::default() }
}
