//! The step line, in torchtitan's format, without values that the device does not report.

mod log;
mod memory;
mod peak;
mod record;

use std::fmt;

pub use log::Metrics;
pub use memory::Memory;
pub use peak::Peak;
pub use record::{HealthRecord, METRICS_FILE, Record, RunRecord, TrainRecord, read_metrics};

/// Values of a step line.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepLine {
    /// Step, counted from 1.
    pub step: usize,
    /// Mean next-token cross entropy of the step's batch, in nats.
    pub loss: f64,
    /// Global gradient norm before clipping.
    pub grad_norm: f64,
    /// Learning rate.
    pub lr: f64,
    /// Peak memory, if known: of the process on a CPU, else memory reserved by CubeCL on the
    /// device.
    pub memory: Option<Memory>,
    /// Tokens per second since the last line.
    pub tokens_per_second: f64,
    /// Model FLOPs of one token: see
    /// [`LanguageModel::flops_per_token`](crate::LanguageModel::flops_per_token).
    pub flops_per_token: f64,
    /// Total peak of all devices, if known.
    pub peak: Option<Peak>,
}

impl StepLine {
    /// Model FLOP/s.
    pub fn flops(&self) -> f64 {
        self.tokens_per_second * self.flops_per_token
    }

    /// Model FLOPs utilization: fractions of the known peaks in FP8 and in bf16, which are at the
    /// rated clock.
    pub fn mfu(&self) -> [Option<f64>; 2] {
        let peaks = self.peak.map_or([None; 2], |peak| [peak.fp8, Some(peak.bf16)]);
        peaks.map(|peak| peak.map(|peak| self.flops() / peak))
    }
}

impl fmt::Display for StepLine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { step, loss, grad_norm, lr, tokens_per_second, .. } = *self;
        write!(f, "step: {step:2}  loss: {loss:8.5}  grad_norm: {grad_norm:7.4}  lr: {lr:.2e}  ")?;
        if let Some(Memory { bytes, total }) = self.memory {
            let gib = bytes as f64 / (1_u64 << 30) as f64;
            write!(f, "memory: {gib:5.2}GiB")?;
            if let Some(total) = total {
                write!(f, "({:.2}%)", 100.0 * bytes as f64 / total as f64)?;
            }
            write!(f, "  ")?;
        }
        let tps = thousands(&format!("{tokens_per_second:.0}"));
        let tflops = thousands(&format!("{:.2}", self.flops() / 1e12));
        write!(f, "tps: {tps}  tflops: {tflops}")?;
        let shares = self.mfu().into_iter().zip(["fp8", "bf16"]);
        let shares = shares.filter_map(|(share, of)| Some(format!("{:.2}% of {of}", 100.0 * share?)));
        let shares: Vec<_> = shares.collect();
        if shares.is_empty() { Ok(()) } else { write!(f, "  mfu: {}", shares.join(", ")) }
    }
}

/// Inserts commas between groups of three digits of the integer part: `1234567.89` →
/// `1,234,567.89`.
pub fn thousands(number: &str) -> String {
    let integer = number.find('.').unwrap_or(number.len());
    let mut text = String::new();
    for (i, digit) in number.chars().enumerate() {
        if i > 0 && i < integer && (integer - i).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// Count with a noun: `1 file`, `1,234 files`.
pub(crate) fn counted(count: u64, one: &str) -> String {
    format!("{} {one}{}", thousands(&count.to_string()), if count == 1 { "" } else { "s" })
}

/// Smaller of two validation losses with their steps; the first if they are equal.
pub(crate) fn better(a: (usize, f64), b: (usize, f64)) -> (usize, f64) {
    if b.1 < a.1 { b } else { a }
}
