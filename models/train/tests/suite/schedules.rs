//! The learning rate at the corners of its curve.

use device_select::SelectedDevice;
use models::Decoders;
use tempfile::TempDir;
use train::checkpoint::{SavedRun, Which};
use train::job::{Start, train};
use train::schedule::{Decay, Schedule};

use crate::common::{Train, run, run_config, text};

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
    // Decay over all steps starts after warm-up.
    close(Schedule { decay_ratio: 1.0, ..wsd }.at(9), 2.0 * (0.1 + 0.9 * (1.0 - 0.5_f64.sqrt())));
    // 3.5 steps are rounded to 4.
    close(Schedule { decay_ratio: 0.25, ..wsd }.at(11), 2.0 * (0.1 + 0.9 * 0.5));
    // A fraction that rounds to no step.
    close(Schedule { decay_ratio: 0.01, ..wsd }.at(13), 2.0);
}

/// A fine-tuning default, a warm-up longer than a tenth of the run, and a jump on resume are
/// reported. Otherwise nothing is printed.
#[test]
fn surprises_of_the_learning_rate_are_said() {
    let (data, folder) = (text(), TempDir::new().unwrap());
    let saved = format!("checkpoint.folder={}", folder.path().join("run").display());
    let fixed = ["training.steps=2", "training.log_every=1", "generate.max_new_tokens=0", "optimizer.decay=constant"];
    let settings = [&fixed[..], &["optimizer.warmup_steps=0", &saved]].concat();
    let (_, quiet) = run(&run_config(data.path(), &settings)).unwrap();
    assert!(quiet.contains("lr: 5.00e-3") && !quiet.contains("learning rate") && !quiet.contains("warm-up"), "{quiet}");
    let (_, lora) = run(&run_config(data.path(), &[&fixed[..], &["lora.rank=2"]].concat())).unwrap();
    assert!(lora.contains("learning rate: 2e-4, the default for fine-tuning (optimizer.lr is absent)\n"), "{lora}");
    assert!(lora.contains("warm-up: 20 of 2 steps, more than a tenth (optimizer.warmup_steps)\n"), "{lora}");
    let resume = |lr: &str| {
        let config = run_config(data.path(), &[&settings[..], &["training.steps=3", lr]].concat());
        let saved = Some(SavedRun::open(&folder.path().join("run"), Which::Step(2)).unwrap());
        let (start, mut log) = (Start { saved, is_resumed: true, ..Start::default() }, vec![]);
        train::<Decoders, Train>(&config, &start, &SelectedDevice::Cpu, &Default::default(), &mut log).unwrap();
        String::from_utf8(log).unwrap()
    };
    let jump = "learning rate: jumps to 1.00e-3 in step 3; before, that step had 5.00e-3\n";
    assert!(resume("optimizer.lr=1e-3").contains(jump));
    assert!(!resume("optimizer.lr=5e-3").contains("learning rate"));
}
