//! `metrics.jsonl`: records of a run for programs, one JSON object per line.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read};
use std::path::Path;

use anyhow::Context;
use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::{Map, Value};

/// Name of the file in a run's folder.
pub const METRICS_FILE: &str = "metrics.jsonl";

/// Maximum bytes of a line.
pub(super) const MAX_LINE: u64 = 64 << 20;

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
    /// Mean loss of the validation batches after this step, in nats per token.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub validation_loss: Option<f64>,
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
    /// Tokens per second since the last line in the log; absent for a step without a line.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tokens_per_second: Option<f64>,
    /// Model TFLOP/s since the last line in the log, with the same rule.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tflops: Option<f64>,
    /// Model FLOPs utilization: fraction of a known device's FP8 peak.
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

fn or_nan<'de, D: Deserializer<'de>>(deserializer: D) -> Result<f64, D::Error> {
    Ok(Option::deserialize(deserializer)?.unwrap_or(f64::NAN))
}

/// Reads the records that count. After a return to an earlier checkpoint, later steps of the old
/// run are dropped. Of several runs, only the last counts.
///
/// # Errors
/// A file that cannot be read, with its path, and a line that is none, with its number.
pub fn read_metrics(path: &Path) -> anyhow::Result<Vec<Record>> {
    let unreadable = || format!("cannot read {}", path.display());
    let mut records: Vec<Record> = vec![];
    let mut lines = BufReader::new(crate::files::open(path).with_context(unreadable)?);
    for number in 1.. {
        let mut line = vec![];
        lines.by_ref().take(MAX_LINE).read_until(b'\n', &mut line).with_context(unreadable)?;
        // A last line without an end is being written, or its process was killed.
        if line.last() != Some(&b'\n') {
            break;
        }
        let parsed = serde_json::from_slice(&line);
        let record: Record =
            parsed.with_context(|| format!("{}:{number}: not a line of {METRICS_FILE}", path.display()))?;
        if record.run.is_some() {
            records.retain(|earlier| 0 < record.step && earlier.step <= record.step);
        }
        records.push(record);
    }
    Ok(records)
}
