//! The step line, and lines of `metrics.jsonl`, written and read back.

use std::collections::HashSet;
use std::fs::{self, OpenOptions};
use std::io::Write;

use device_select::{AdapterInfo, SelectedDevice};
use trainer::metrics::{METRICS_FILE, Memory, Metrics, Peak, Record, RunRecord, StepLine, TrainRecord, read_metrics};

use super::support::step;

#[test]
fn a_run_that_went_back_keeps_the_later_lines() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join(METRICS_FILE);
    let run = |step| Record { step, run: Some(RunRecord::default()), ..Default::default() };
    let lines = [run(0), step(10, 3.0), step(20, 2.0), step(30, 1.0), run(20), step(30, 0.5)];
    let mut file = Metrics::append(&path).unwrap();
    lines.iter().for_each(|record| file.write(record).unwrap());
    let read = read_metrics(&path).unwrap();
    let steps: Vec<_> = read.iter().filter_map(|r| Some((r.step, r.train.as_ref()?.loss))).collect();
    assert_eq!(steps, [(10, 3.0), (20, 2.0), (30, 0.5)]);
}

#[test]
fn an_unfinished_last_line_is_dropped() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join(METRICS_FILE);
    Metrics::append(&path).unwrap().write(&step(1, f64::NAN)).unwrap();
    OpenOptions::new().append(true).open(&path).unwrap().write_all(b"{\"step\": 2, \"lo").unwrap();
    assert_eq!(read_metrics(&path).unwrap().len(), 1);
    Metrics::append(&path).unwrap().write(&step(3, 1.0)).unwrap();
    let read = read_metrics(&path).unwrap();
    assert_eq!(read.iter().map(|record| record.step).collect::<Vec<_>>(), [1, 3]);
    assert!(read[0].train.as_ref().unwrap().loss.is_nan(), "not finite");
}

#[test]
fn a_line_has_a_step_if_it_has_a_loss() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join(METRICS_FILE);
    let read = |line: &str| {
        fs::write(&path, format!("{line}\n")).unwrap();
        read_metrics(&path).map(|mut records| records.remove(0).train).map_err(|error| format!("{error:#}"))
    };
    let train = TrainRecord { loss: 2.5, grad_norm: 1.0, lr: 0.1, ..Default::default() };
    let unknown = r#"{"step": 1, "loss": 2.5, "grad_norm": 1, "lr": 0.1, "mood": "good"}"#;
    assert_eq!((read(unknown), read(r#"{"step": 1, "lr": 0.1}"#)), (Ok(Some(train)), Ok(None)));
    for (line, says) in [
        (r#"{"step": 1, "loss": "low", "grad_norm": 1, "lr": 0.1}"#, "invalid type: string"),
        (r#"{"step": 1, "loss": 2.5, "lr": 0.1}"#, "missing field `grad_norm`"),
    ] {
        let (error, expected) = (read(line).unwrap_err(), format!(":1: not a line of metrics.jsonl: {says}"));
        assert!(error.contains(&expected), "{error}");
    }
}

fn line() -> StepLine {
    StepLine {
        step: 1,
        loss: 8.123_451,
        grad_norm: 1.234_51,
        lr: 2.5e-4,
        memory: Some(Memory { bytes: 558_345_749, total: Some(101_517_408_909) }),
        tokens_per_second: 7034.4,
        flops_per_token: 58_600_000.0,
        peak: None,
    }
}

/// The step line is torchtitan's, without values that a device does not report.
#[test]
fn step_lines() {
    let start = "loss:  8.12345  grad_norm:  1.2345  lr: 2.50e-4";
    let short = StepLine { memory: None, peak: None, step: 1000, tokens_per_second: 1_234_567.0, ..line() };
    let memory = Some(Memory { bytes: 3 << 30, total: None });
    for (line, expected) in [
        (line(), format!("step:  1  {start}  memory:  0.52GiB(0.55%)  tps: 7,034  tflops: 0.41")),
        (short, format!("step: 1000  {start}  tps: 1,234,567  tflops: 72.35")),
        (StepLine { flops_per_token: 1e9, ..short }, format!("step: 1000  {start}  tps: 1,234,567  tflops: 1,234.57")),
        (StepLine { memory, ..short }, format!("step: 1000  {start}  memory:  3.00GiB  tps: 1,234,567  tflops: 72.35")),
        (StepLine { tokens_per_second: 999.6, ..short }, format!("step: 1000  {start}  tps: 1,000  tflops: 0.06")),
    ] {
        assert_eq!(line.to_string(), expected);
    }
}

#[test]
fn known_devices_have_their_peaks() {
    // FLOPs per token such that two H100s reach 100 % of their FP8 peak, and 200 % of their bf16
    // peak.
    let used = |name: &str, count| {
        let peak = Peak::of_devices(name, count);
        StepLine { tokens_per_second: 1e3, flops_per_token: 2.0 * 1979e9, peak, ..line() }.to_string()
    };
    assert!(used("NVIDIA H100 80GB HBM3", 2).ends_with("  mfu: 100.00% of fp8, 200.00% of bf16"));
    assert!(used("NVIDIA H100 80GB HBM3", 4).ends_with("  mfu: 50.00% of fp8, 100.00% of bf16"));
    // It has no FP8.
    assert!(used("NVIDIA A100-SXM4-80GB", 1).ends_with("  mfu: 1268.59% of bf16"));
    for unknown in ["", "NVIDIA H100", "NVIDIA H100 80GB HBM3 MIG 1g.10gb", "NVIDIA GeForce RTX 4090 Laptop GPU"] {
        assert!(!used(unknown, 1).contains("mfu"), "{unknown}");
    }
    let gpu = |hardware| SelectedDevice::Wgpu(AdapterInfo { name: "NVIDIA L4".into(), hardware });
    assert_eq!(gpu(true).hardware_name().as_deref(), Some("NVIDIA L4"));
    assert_eq!((gpu(false).hardware_name(), SelectedDevice::Cpu.hardware_name()), (None, None));
}

/// Each device occurs once, and its FP8 peak is twice its bf16 peak up to datasheet rounding.
#[test]
fn the_table_of_peaks_is_consistent() {
    let mut names = HashSet::new();
    for row in Peak::TABLE.lines().skip(2) {
        let [_, name, fp8, bf16, source, _] = row.split('|').map(str::trim).collect::<Vec<_>>()[..] else {
            panic!("{row}")
        };
        assert!(names.insert(name) && !source.is_empty(), "{row}");
        let bf16: f64 = bf16.parse().unwrap();
        let ratio = fp8.parse::<f64>().map_or(2.0, |fp8| fp8 / bf16);
        assert!((ratio - 2.0).abs() < 0.03, "{row}");
    }
}

#[cfg(target_os = "linux")]
#[test]
fn the_process_knows_its_memory() {
    let Memory { bytes, total } = Memory::of_process().unwrap();
    assert!(bytes > 1 << 20 && bytes < total.unwrap());
}
