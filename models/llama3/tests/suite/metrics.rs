//! The step line, character by character.

use train::metrics::{Memory, StepLine};

fn line() -> StepLine {
    StepLine {
        step: 1,
        loss: 8.123_451,
        grad_norm: 1.234_51,
        memory: Some(Memory { bytes: 558_345_749, total: Some(101_517_408_909) }),
        tokens_per_second: 7034.4,
        flops_per_token: 58_600_000.0,
        peak_flops: Some(989e12),
    }
}

#[test]
fn the_step_line_is_torchtitans() {
    assert_eq!(
        line().to_string(),
        "step:  1  loss:  8.12345  grad_norm:  1.2345  memory:  0.52GiB(0.55%)  tps: 7,034  tflops: 0.41  mfu: 0.04%"
    );
}

#[test]
fn what_a_device_cannot_tell_is_left_out() {
    let short = StepLine { memory: None, peak_flops: None, step: 1000, tokens_per_second: 1_234_567.0, ..line() };
    assert_eq!(short.to_string(), "step: 1000  loss:  8.12345  grad_norm:  1.2345  tps: 1,234,567  tflops: 72.35");
    let fast = StepLine { flops_per_token: 1e9, ..short };
    assert!(fast.to_string().ends_with("tflops: 1,234.57"), "{fast}");
    let device = StepLine { memory: Some(Memory { bytes: 3 << 30, total: None }), ..line() };
    assert!(device.to_string().contains("  memory:  3.00GiB  tps: "), "{device}");
    let slow = StepLine { tokens_per_second: 999.6, ..short };
    assert!(slow.to_string().contains("tps: 1,000 "), "{slow}");
}

#[cfg(target_os = "linux")]
#[test]
fn the_process_knows_its_memory() {
    let Memory { bytes, total } = Memory::of_process().unwrap();
    assert!(bytes > 1 << 20 && bytes < total.unwrap());
}
