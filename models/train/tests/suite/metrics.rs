//! The step line, character by character.

use std::collections::HashSet;

use device_select::{AdapterInfo, SelectedDevice};
use train::metrics::{Memory, Peak, StepLine};

fn line() -> StepLine {
    StepLine {
        step: 1,
        loss: 8.123_451,
        grad_norm: 1.234_51,
        lr: 2.5e-4,
        memory: Some(Memory { bytes: 558_345_749, total: Some(101_517_408_909) }),
        tokens_per_second: 7034.4,
        flops_per_token: 58_600_000.0,
        peak: Some(Peak::Given(989e12)),
    }
}

#[test]
fn the_step_line_is_torchtitans() {
    assert_eq!(
        line().to_string(),
        "step:  1  loss:  8.12345  grad_norm:  1.2345  lr: 2.50e-4  memory:  0.52GiB(0.55%)  tps: 7,034  tflops: 0.41  mfu: 0.04%"
    );
}

#[test]
fn what_a_device_cannot_tell_is_left_out() {
    let short = StepLine { memory: None, peak: None, step: 1000, tokens_per_second: 1_234_567.0, ..line() };
    let expected = "step: 1000  loss:  8.12345  grad_norm:  1.2345  lr: 2.50e-4  tps: 1,234,567  tflops: 72.35";
    assert_eq!(short.to_string(), expected);
    let fast = StepLine { flops_per_token: 1e9, ..short };
    assert!(fast.to_string().ends_with("tflops: 1,234.57"), "{fast}");
    let device = StepLine { memory: Some(Memory { bytes: 3 << 30, total: None }), ..line() };
    assert!(device.to_string().contains("  memory:  3.00GiB  tps: "), "{device}");
    let slow = StepLine { tokens_per_second: 999.6, ..short };
    assert!(slow.to_string().contains("tps: 1,000 "), "{slow}");
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

/// Each device occurs once, its FP8 peak is twice its bf16 peak up to datasheet rounding, and the
/// documentation has the same table.
#[test]
fn the_table_of_peaks_is_the_documentations() {
    let table = Peak::table();
    let docs = include_str!("../../../../docs/watch.md");
    assert!(docs.contains(&table), "docs/watch.md lacks\n{table}");
    let mut names = HashSet::new();
    for row in table.lines().skip(2) {
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
