//! The learning rate at the corners of its curve.

use crate::common::*;

/// Rate at this share of the way from the floor to the peak.
fn curve(left: f64) -> f64 {
    2.0 * (0.1 + 0.9 * left)
}

fn schedule(decay: Decay) -> Schedule {
    Schedule { lr: 2.0, warmup_steps: 4, steps: 14, decay, min_lr_ratio: 0.1, decay_ratio: 0.3 }
}

#[test]
fn the_rate_follows_its_curve() {
    let cosine = |share: f64| (1.0 + (share * std::f64::consts::PI).cos()) / 2.0;
    let root = 1.0 - 0.5_f64.sqrt();
    // Steps, and the share of the way from the floor to the peak that is left.
    for (decay, points) in [
        (Decay::Cosine, vec![(3, 1.0), (4, 1.0), (6, cosine(0.2)), (9, 0.5), (14, 0.0)]),
        (Decay::Linear, vec![(3, 1.0), (4, 1.0), (6, 0.8), (9, 0.5), (14, 0.0)]),
        (Decay::Constant, vec![(3, 1.0), (13, 1.0)]),
        // 14 steps: the last 4 (0.3 · 14, rounded) decay by a square root.
        (Decay::Wsd, vec![(3, 1.0), (4, 1.0), (10, 1.0), (11, 0.5), (12, root), (14, 0.0)]),
    ] {
        let schedule = schedule(decay);
        for (step, lr) in [(0, 0.5), (1, 1.0)].into_iter().chain(points.into_iter().map(|(s, left)| (s, curve(left)))) {
            assert!((schedule.at(step) - lr).abs() < 1e-12, "{decay:?} {step}: {} {lr}", schedule.at(step));
        }
        assert!((4..13).all(|step| schedule.at(step + 1) <= schedule.at(step)));
    }
    let wsd = schedule(Decay::Wsd);
    for (other, step, lr) in [
        // A run shorter than its warm-up, and a run of nothing.
        (Schedule { warmup_steps: 100, steps: 4, ..schedule(Decay::Cosine) }, 0, 0.5),
        (Schedule { warmup_steps: 100, steps: 4, ..schedule(Decay::Cosine) }, 3, 2.0),
        (Schedule { warmup_steps: 0, steps: 0, ..schedule(Decay::Cosine) }, 0, 2.0),
        // Decay over all steps starts after warm-up.
        (Schedule { decay_ratio: 1.0, ..wsd }, 9, curve(root)),
        // 3.5 steps are rounded to 4; a fraction may round to no step.
        (Schedule { decay_ratio: 0.25, ..wsd }, 11, curve(0.5)),
        (Schedule { decay_ratio: 0.01, ..wsd }, 13, 2.0),
    ] {
        assert!((other.at(step) - lr).abs() < 1e-12, "{other:?} {step}");
    }
}

/// A fine-tuning default, a warm-up longer than a tenth of the run, and a jump on resume are
/// reported. Otherwise nothing is printed.
#[test]
fn surprises_of_the_learning_rate_are_said() {
    let (data, folder) = (text(), TempDir::new().unwrap());
    let saved = saved(folder.path().join("run"));
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
