//! The learning rate at the corners of its curve.

use train::schedule::{Decay, Schedule};

fn schedule(decay: Decay) -> Schedule {
    Schedule { lr: 2.0, warmup_steps: 4, steps: 14, decay, min_lr_ratio: 0.1, decay_ratio: 0.3 }
}

fn close(a: f64, b: f64) {
    assert!((a - b).abs() < 1e-12, "{a} {b}");
}

#[test]
fn warm_up_ends_at_the_peak_and_decay_goes_towards_the_floor() {
    for decay in [Decay::Cosine, Decay::Linear] {
        let schedule = schedule(decay);
        for (step, lr) in [(0, 0.5), (1, 1.0), (3, 2.0), (4, 2.0), (9, 2.0 * 0.55), (14, 0.2)] {
            close(schedule.at(step), lr);
        }
        assert!((4..13).all(|step| schedule.at(step + 1) < schedule.at(step)));
    }
    close(schedule(Decay::Cosine).at(6), 2.0 * (0.1 + 0.9 * (1.0 + (0.2 * std::f64::consts::PI).cos()) / 2.0));
    close(schedule(Decay::Linear).at(6), 2.0 * (0.1 + 0.9 * 0.8));
    close(schedule(Decay::Constant).at(13), 2.0);
}

#[test]
fn a_run_shorter_than_its_warm_up_and_a_run_of_nothing() {
    let short = Schedule { warmup_steps: 100, steps: 4, ..schedule(Decay::Cosine) };
    close(short.at(0), 0.5);
    close(short.at(3), 2.0);
    let none = Schedule { warmup_steps: 0, steps: 0, ..schedule(Decay::Cosine) };
    close(none.at(0), 2.0);
}

/// 14 steps: the last 4 (0.3 · 14, rounded) decay.
#[test]
fn wsd_keeps_the_peak_and_then_falls_by_a_square_root() {
    let wsd = schedule(Decay::Wsd);
    assert!((4..=10).all(|step| wsd.at(step) == 2.0));
    for (step, left) in [(11, 0.5), (12, 1.0 - 0.5_f64.sqrt()), (14, 0.0)] {
        close(wsd.at(step), 2.0 * (0.1 + 0.9 * left));
    }
    // All of the steps, and those after warm-up.
    close(Schedule { decay_ratio: 1.0, ..wsd }.at(9), 2.0 * (0.1 + 0.9 * (1.0 - 0.5_f64.sqrt())));
    // 3.5 steps are 4.
    close(Schedule { decay_ratio: 0.25, ..wsd }.at(11), 2.0 * (0.1 + 0.9 * 0.5));
    // A share that rounds to no step.
    close(Schedule { decay_ratio: 0.01, ..wsd }.at(13), 2.0);
}
