//! `metrics.jsonl`: records of a run for programs, one JSON object per line.

use anyhow::Context;
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, BufRead, BufReader, ErrorKind, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::{Map, Value};

use crate::TrainError;

/// Name of the file in a run's folder.
pub const METRICS_FILE: &str = "metrics.jsonl";

/// Maximum bytes of a line.
const MAX_LINE: u64 = 64 << 20;

/// One line. Steps increase, except where a run was resumed from an earlier checkpoint. Then the
/// last line of a step counts, and earlier lines of later steps do not.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Record {
    /// Completed optimizer steps; 0 for values before the first.
    pub step: usize,
    /// Description of the run, in its first line and after each resume.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub run: Option<RunRecord>,
    /// Values of a step.
    #[serde(flatten, skip_serializing_if = "Option::is_none", deserialize_with = "step_line")]
    pub train: Option<TrainRecord>,
    /// Mean loss of the held-out batches after this step, in nats per token.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub held_out_loss: Option<f64>,
    /// Why the run ended at this step: it diverged. Names a non-finite loss or gradient norm, and
    /// the first non-finite operand of an FP8 linear, if any.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub diverged: Option<String>,
    /// FP8 statistics of the last sampled step, by layer and by operand (`input`, `weight`,
    /// `grad_output`, each with `_t` where the transpose is cast).
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub health: BTreeMap<String, BTreeMap<String, HealthRecord>>,
}

/// Description of a run.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct RunRecord {
    /// f32, bf16 or fp8.
    pub precision: String,
    /// The recipe, if the precision is fp8.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub recipe: Option<String>,
    /// The device.
    pub device: String,
    /// Planned steps.
    pub steps: usize,
}

/// Values of a step. Only a step with a line in the log has throughput, memory and GEMM calls.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct TrainRecord {
    /// Mean cross entropy of the step's batch, in nats per token. A value that is not finite is
    /// null in JSON and NaN when read back.
    #[serde(deserialize_with = "or_nan")]
    pub loss: f64,
    /// Global gradient norm before clipping, with the same rule.
    #[serde(deserialize_with = "or_nan")]
    pub grad_norm: f64,
    /// Learning rate.
    #[serde(deserialize_with = "or_nan")]
    pub lr: f64,
    /// Tokens per second since the last line in the log. NaN for a step without a line, and then
    /// not written.
    #[serde(default = "nan", deserialize_with = "or_nan", skip_serializing_if = "is_nan")]
    pub tokens_per_second: f64,
    /// Model TFLOP/s since the last line in the log, with the same rule.
    #[serde(default = "nan", deserialize_with = "or_nan", skip_serializing_if = "is_nan")]
    pub tflops: f64,
    /// Model FLOPs utilization: fraction of `training.peak_tflops`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mfu: Option<f64>,
    /// Fraction of a known device's FP8 peak.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mfu_fp8: Option<f64>,
    /// Fraction of a known device's bf16 peak.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mfu_bf16: Option<f64>,
    /// Peak memory in bytes: the device's as counted by CubeCL, or the process's on a CPU.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_bytes: Option<u64>,
    /// GEMM calls of linears since the run was started or resumed, by path (`wgmma`, `emulated`,
    /// ..; `high_precision`).
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub gemms: BTreeMap<String, u64>,
}

/// Quality of an operand's FP8 representation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct HealthRecord {
    /// The sampled step.
    pub step: usize,
    /// Signal-to-quantization-noise ratio in dB; `None` if the operand is zero.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sqnr_db: Option<f64>,
    /// Fraction of elements beyond the format.
    pub saturated: f64,
    /// Fraction of non-zero elements whose code is zero.
    pub flushed: f64,
    /// Elements that are inf or NaN.
    pub non_finite: u64,
}

/// Parses a step if the line has a `loss`. Serde's flattened `Option` would be `None` for a field
/// that cannot be read.
fn step_line<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<TrainRecord>, D::Error> {
    let fields = Map::deserialize(deserializer)?;
    let step = fields.contains_key("loss").then(|| TrainRecord::deserialize(Value::Object(fields)));
    step.transpose().map_err(D::Error::custom)
}

const fn nan() -> f64 {
    f64::NAN
}

fn is_nan(value: &f64) -> bool {
    value.is_nan()
}

fn or_nan<'de, D: Deserializer<'de>>(deserializer: D) -> Result<f64, D::Error> {
    Ok(Option::deserialize(deserializer)?.unwrap_or(f64::NAN))
}

/// Error of reading a metrics file.
#[derive(Debug, thiserror::Error)]
pub enum MetricsError {
    /// The file cannot be read.
    #[error("cannot read {}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// The system's reason.
        source: std::io::Error,
    },
    /// Invalid line.
    #[error("{}:{line}: not a line of {METRICS_FILE}: {source}", path.display())]
    Line {
        /// The file.
        path: PathBuf,
        /// Line number, counted from 1.
        line: usize,
        /// The parser's reason.
        source: serde_json::Error,
    },
}

/// Appends lines to a metrics file.
#[derive(Debug)]
pub struct MetricsFile {
    path: PathBuf,
    file: File,
}

impl MetricsFile {
    /// Opens a file for appending, or creates it. A link is an error. An unfinished last line is
    /// removed.
    ///
    /// # Errors
    /// [`TrainError::Write`].
    pub fn append(path: &Path) -> Result<Self, TrainError> {
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
        Ok(Self { path: path.into(), file })
    }

    /// The file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Writes a line.
    ///
    /// # Errors
    /// [`TrainError::Write`].
    pub fn write(&mut self, record: &Record) -> Result<(), TrainError> {
        let written = serde_json::to_vec(record).map_err(std::io::Error::from).and_then(|mut line| {
            line.push(b'\n');
            self.file.write_all(&line)
        });
        written.with_context(|| format!("cannot write {}", self.path.display()))
    }
}

/// Reads the records that count. After a return to an earlier checkpoint, later steps of the old
/// run are dropped. Of several runs, only the last counts.
///
/// # Errors
/// Any [`MetricsError`].
pub fn read_metrics(path: &Path) -> Result<Vec<Record>, MetricsError> {
    let io = |source| MetricsError::Io { path: path.into(), source };
    let mut records: Vec<Record> = vec![];
    let mut lines = BufReader::new(crate::files::open(path).map_err(io)?);
    for number in 1.. {
        let mut line = vec![];
        // A last line without an end is being written, or its process was killed.
        if lines.by_ref().take(MAX_LINE).read_until(b'\n', &mut line).map_err(io)? == 0 || line.last() != Some(&b'\n') {
            break;
        }
        let record: Record = serde_json::from_slice(&line).map_err(|source| MetricsError::Line {
            path: path.into(),
            line: number,
            source,
        })?;
        if record.run.is_some() {
            records.retain(|earlier| 0 < record.step && earlier.step <= record.step);
        }
        records.push(record);
    }
    Ok(records)
}

#[cfg(test)]
mod tests {
    use std::fs::OpenOptions;

    use super::*;

    fn step(step: usize, loss: f64) -> Record {
        Record { step, train: Some(TrainRecord { loss, ..Default::default() }), ..Default::default() }
    }

    #[test]
    fn lines_come_back() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(METRICS_FILE);
        let run = Record { run: Some(RunRecord { steps: 30, ..Default::default() }), ..Default::default() };
        let health = HealthRecord { step: 9, sqnr_db: Some(31.5), ..Default::default() };
        let health = BTreeMap::from([("layers.0".into(), BTreeMap::from([("input".into(), health)]))]);
        let all = [
            run,
            step(10, 2.5),
            Record { step: 10, held_out_loss: Some(2.0), ..Default::default() },
            Record { step: 10, health, ..Default::default() },
            step(20, 1.5),
        ];
        let mut file = MetricsFile::append(&path).unwrap();
        all.iter().for_each(|record| file.write(record).unwrap());
        assert_eq!(read_metrics(&path).unwrap(), all);
    }

    #[test]
    fn a_run_that_went_back_is_what_it_then_was() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(METRICS_FILE);
        let run = |step| Record { step, run: Some(RunRecord::default()), ..Default::default() };
        let lines = [run(0), step(10, 3.0), step(20, 2.0), step(30, 1.0), run(20), step(30, 0.5)];
        let mut file = MetricsFile::append(&path).unwrap();
        lines.iter().for_each(|record| file.write(record).unwrap());
        let steps: Vec<_> =
            read_metrics(&path).unwrap().iter().filter_map(|r| Some((r.step, r.train.as_ref()?.loss))).collect();
        assert_eq!(steps, [(10, 3.0), (20, 2.0), (30, 0.5)]);
    }

    #[test]
    fn unfinished_lines_and_others() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(METRICS_FILE);
        let mut first = step(1, f64::NAN);
        first.train.as_mut().unwrap().tokens_per_second = f64::INFINITY;
        MetricsFile::append(&path).unwrap().write(&first).unwrap();
        OpenOptions::new().append(true).open(&path).unwrap().write_all(b"{\"step\": 2, \"lo").unwrap();
        assert_eq!(read_metrics(&path).unwrap().len(), 1);
        MetricsFile::append(&path).unwrap().write(&step(3, 1.0)).unwrap();
        let read = read_metrics(&path).unwrap();
        assert_eq!(read.iter().map(|record| record.step).collect::<Vec<_>>(), [1, 3]);
        assert!(read[0].train.as_ref().unwrap().loss.is_nan());
        std::fs::write(&path, "{\"step\": 1}\nnothing\n").unwrap();
        assert!(matches!(read_metrics(&path), Err(MetricsError::Line { line: 2, .. })));
    }

    #[test]
    fn fields_of_a_step() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(METRICS_FILE);
        let read = |line: &str| {
            std::fs::write(&path, format!("{line}\n")).unwrap();
            read_metrics(&path).map(|mut records| records.remove(0).train)
        };
        let step = read(r#"{"step": 1, "loss": 2.5, "grad_norm": 1, "lr": 0.1, "mood": "good"}"#).unwrap().unwrap();
        assert!(step.loss == 2.5 && step.tokens_per_second.is_nan() && step.tflops.is_nan());
        assert_eq!(read(r#"{"step": 1, "lr": 0.1}"#).unwrap(), None);
        for wrong in
            [r#"{"step": 1, "loss": "low", "grad_norm": 1, "lr": 0.1}"#, r#"{"step": 1, "loss": 2.5, "lr": 0.1}"#]
        {
            assert!(matches!(read(wrong), Err(MetricsError::Line { line: 1, .. })), "{wrong}");
        }
    }
}
