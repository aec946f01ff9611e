//! [`Metrics`]: writes a run's `metrics.jsonl`.

use std::fs::File;
use std::io::{self, ErrorKind, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use burn_float8::{Float8Stack, Monitor};
use device_select::SelectedDevice;

use super::record::{HealthRecord, MAX_LINE, Record, RunRecord, TrainRecord, read_metrics};
use super::{StepLine, better};
use crate::atomic;
use crate::config::Precision;
use crate::steps::StepConfig;

/// Appends a run's records to a file.
#[derive(Debug)]
pub struct Metrics {
    path: PathBuf,
    file: File,
    /// Last sampled step that was written.
    sampled: u64,
}

impl Metrics {
    /// Opens a file for appending, or creates it. A link is an error. An unfinished last line is
    /// removed.
    ///
    /// # Errors
    /// A file that cannot be written.
    pub fn append(path: &Path) -> Result<Self> {
        let open = || {
            let mut file = crate::files::append(path)?;
            let begin = file.metadata()?.len().saturating_sub(MAX_LINE);
            let mut text = vec![];
            file.seek(SeekFrom::Start(begin))?;
            (&file).take(MAX_LINE).read_to_end(&mut text)?;
            match text.iter().rposition(|byte| *byte == b'\n') {
                Some(end) => file.set_len(begin + end as u64 + 1)?,
                None if begin == 0 => file.set_len(0)?,
                None => return Err(io::Error::new(ErrorKind::InvalidData, "it has no lines")),
            }
            Ok(file)
        };
        let file = open().with_context(|| format!("cannot write {}", path.display()))?;
        Ok(Self { path: path.into(), file, sampled: 0 })
    }

    /// Creates a file, replacing an existing one.
    ///
    /// # Errors
    /// A file that cannot be written.
    pub fn create(path: &Path) -> Result<Self> {
        atomic::replace(path, b"").with_context(|| format!("cannot write {}", path.display()))?;
        Self::append(path)
    }

    /// Writes a line.
    ///
    /// # Errors
    /// A file that cannot be written.
    pub fn write(&mut self, record: &Record) -> Result<()> {
        let written = serde_json::to_vec(record).map_err(io::Error::from).and_then(|mut line| {
            line.push(b'\n');
            self.file.write_all(&line)
        });
        written.with_context(|| format!("cannot write {}", self.path.display()))
    }

    /// Writes the run's record and returns its smallest validation loss so far, with its step. A file
    /// that cannot be parsed does not stop the run; it is reported on `out`.
    pub(crate) fn begin(
        &mut self,
        done: usize,
        config: StepConfig<'_>,
        selected: &SelectedDevice,
        out: &mut dyn Write,
    ) -> Result<Option<(usize, f64)>> {
        let precision = config.training.precision;
        let run = RunRecord {
            precision: format!("{precision:?}").to_lowercase(),
            recipe: (precision == Precision::Fp8).then(|| config.float8.config.linear.recipe().to_string()),
            device: selected.to_string(),
            steps: config.training.steps.get(),
        };
        self.write(&Record { step: done, run: Some(run), ..Record::default() })?;
        match read_metrics(&self.path) {
            Ok(records) => Ok(records.into_iter().filter_map(|r| Some((r.step, r.validation_loss?))).reduce(better)),
            Err(error) => {
                writeln!(out, "{error:#}: the best validation loss is that from here on")?;
                Ok(None)
            }
        }
    }

    /// Writes a step without a line in the log.
    pub(crate) fn seen(&mut self, step: usize, loss: f64, grad_norm: f64, lr: f64) -> Result<()> {
        self.write(&Record {
            step,
            train: Some(TrainRecord { loss, grad_norm, lr, ..TrainRecord::default() }),
            ..Record::default()
        })
    }

    /// Writes a step with a line in the log, and new FP8 statistics.
    pub(crate) fn step<B: Float8Stack>(&mut self, line: &StepLine, monitor: &Monitor<B>) -> Result<()> {
        let [mfu_fp8, mfu_bf16] = line.mfu();
        let train = TrainRecord {
            loss: line.loss,
            grad_norm: line.grad_norm,
            lr: line.lr,
            tokens_per_second: Some(line.tokens_per_second),
            tflops: Some(line.flops() / 1e12),
            mfu_fp8,
            mfu_bf16,
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
        self.write(&record)
    }

    /// Writes that the run diverged at a step, with its loss and gradient norm if they are the
    /// cause.
    pub(crate) fn diverged(&mut self, step: usize, seen: Option<[f64; 2]>, why: String) -> Result<()> {
        let train =
            seen.map(|[loss, grad_norm]| TrainRecord { loss, grad_norm, lr: f64::NAN, ..TrainRecord::default() });
        self.write(&Record { step, train, diverged: Some(why), ..Record::default() })
    }

    /// Writes the validation loss after a step.
    pub(crate) fn held_out(&mut self, step: usize, loss: f64) -> Result<()> {
        self.write(&Record { step, validation_loss: Some(loss), ..Record::default() })
    }
}
