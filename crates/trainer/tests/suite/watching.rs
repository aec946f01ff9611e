//! Records of a running training: metrics, validation losses, and divergence.

use crate::common::run_config as config;
use crate::common::*;

pub(crate) fn recorded(folder: &Path, settings: &[&str]) -> (Outcome, Vec<Record>, String) {
    let data = text();
    let saved = saved(folder);
    let (outcome, log) =
        run(&config(data.path(), &[&[&*saved, "checkpoint.save_steps=0"], settings].concat())).unwrap();
    (outcome, read_metrics(&folder.join(METRICS_FILE)).unwrap(), log)
}

fn losses(outcome: &Outcome) -> Vec<(usize, f64)> {
    outcome.steps.iter().map(|line| (line.step, line.loss)).collect()
}

#[test]
fn a_run_writes_its_metrics() {
    let folder = tempfile::tempdir().unwrap();
    let (every, statistics) = ("training.eval_every=3", "float8.statistics={ every_n_steps = 4 }");
    let settings = ["training.log_every=4", "optimizer.warmup_steps=2", every, statistics];
    let (outcome, records, log) = recorded(&folder.path().join("run"), &settings);
    let run = records[0].run.clone().unwrap();
    assert_eq!((run.precision.as_str(), run.recipe.as_deref(), run.steps), ("fp8", Some("tensorwise"), 12));
    assert_eq!((records[0].step, run.device.as_str()), (0, "cpu"));
    let steps: Vec<_> = records.iter().filter_map(|r| Some((r.step, r.train.clone()?))).collect();
    assert!(steps.iter().map(|(step, _)| *step).eq(1..=12), "{steps:?}");
    assert!(steps.iter().all(|(_, train)| train.grad_norm > 0.0 && train.lr > 0.0));
    // A step with a line in the log has more values.
    let steps: Vec<_> = steps.into_iter().filter(|(_, train)| train.tokens_per_second.is_some()).collect();
    assert_eq!(steps.iter().map(|(step, train)| (*step, train.loss)).collect::<Vec<_>>(), losses(&outcome));
    let calls = |i: usize| steps[i].1.gemms["host"];
    // Evaluations add fprops, but each step runs the same three GEMMs of the same linears.
    assert!(calls(0) > 0 && calls(3) > calls(2) && calls(2) > calls(1), "{:?}", steps[3].1.gemms);
    assert_eq!(steps[0].1.lr, 5e-3 / 2.0);
    for (_, train) in &steps {
        assert!(train.tokens_per_second > Some(0.0) && train.tflops > Some(0.0));
        assert_eq!(train.memory_bytes.is_some(), cfg!(target_os = "linux"));
    }
    // Validation losses: every third step, each once; the last is the outcome's.
    let held_out: Vec<_> = records.iter().filter_map(|r| Some((r.step, r.validation_loss?))).collect();
    assert_eq!(held_out.iter().map(|(step, _)| *step).collect::<Vec<_>>(), [3, 6, 9, 12]);
    assert_eq!(Some(held_out[3].1), outcome.validation_loss);
    let best = held_out.iter().copied().reduce(|a, b| if b.1 < a.1 { b } else { a }).unwrap();
    assert_eq!(outcome.best_validation_loss, Some(best));
    assert_eq!(log.matches("  validation loss: ").count(), 3, "{log}");
    // Statistics of sampled steps, by layer and operand, each once.
    let health: Vec<_> = records.iter().filter(|r| !r.health.is_empty()).collect();
    assert!(health.len() >= 2, "{records:?}");
    let operands = &health[0].health["layers.0.self_attn.q_proj"];
    assert!(operands["input"].sqnr_db.unwrap() > 20.0 && operands.contains_key("grad_output"), "{operands:?}");
    let [first, second] = [0, 1].map(|i: usize| health[i].health["layers.0.mlp.gate_proj"]["weight"].step);
    assert!(first < second);
}

/// Evaluating and recording do not change the training.
#[test]
fn losses_are_the_same_whoever_looks() {
    let folder = tempfile::tempdir().unwrap();
    let every = ["training.eval_every=1", "float8.statistics={ every_n_steps = 1 }"];
    for recipe in ["tensorwise", "delayed"] {
        let recipe = format!("float8.recipe={recipe}");
        let settings = ["training.steps=6", "training.log_every=1", &recipe];
        let (alone, ..) = recorded(&folder.path().join("alone").join(&recipe), &settings);
        let (seen, records, _) = recorded(&folder.path().join(&recipe), &[&settings[..], &every].concat());
        assert_eq!(losses(&alone), losses(&seen));
        // The file has only the last run.
        assert_eq!(records.iter().filter(|r| r.run.is_some()).count(), 1);
    }
}

/// Divergence is detected at its step for any `log_every`, with the first non-finite operand.
#[test]
fn divergence_is_noticed_at_its_step_and_names_the_layer() {
    let data = text();
    let of = |settings: &[&str]| {
        let common =
            ["optimizer.lr=1e30", "training.grad_clip_norm=inf", "optimizer.warmup_steps=0", "training.steps=100"];
        match cause(run(&config(data.path(), &[&common[..], settings].concat()))) {
            RunError::Diverged(diverged) => diverged,
            other => panic!("{other:?}"),
        }
    };
    let seen = of(&["training.log_every=1"]);
    let unseen = of(&["training.log_every=100"]);
    assert_eq!((seen.step, seen.step < 10), (unseen.step, true), "{seen:?}");
    assert!(!unseen.loss.is_finite() || !unseen.grad_norm.is_finite());
    let cause = unseen.cause.clone().unwrap();
    assert!(cause.layer.starts_with("layers.") && !cause.amax.is_finite(), "{cause}");
    assert!(unseen.to_string().contains(&cause.to_string()), "{unseen}");
    // It is the last record of the metrics.
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join(METRICS_FILE);
    let saved = saved(folder.path());
    let again = of(&["training.log_every=100", "checkpoint.save_steps=0", &saved]);
    let last = read_metrics(&file).unwrap().pop().unwrap();
    assert_eq!(last.step, again.step);
    let (train, why) = (last.train.unwrap(), last.diverged.unwrap());
    assert!(!train.loss.is_finite() || !train.grad_norm.is_finite());
    assert!(why.starts_with("training diverged at step ") && why.contains(&cause.layer), "{why}");
    // f32 has no operand statistics.
    assert_eq!(of(&["training.precision=f32"]).cause, None);
}

/// All gradients are finite, and their squares are not.
#[test]
fn a_norm_beyond_f32_is_noticed() {
    let data = text();
    let settings = ["lora.rank=2", "lora.alpha=1e30", "training.precision=f32", "training.steps=3"];
    match cause(run(&config(data.path(), &settings))) {
        RunError::Diverged(diverged) => {
            assert_eq!((diverged.step, diverged.grad_norm), (1, f64::INFINITY), "{diverged:?}");
            assert!(diverged.loss.is_finite(), "{diverged:?}");
        }
        other => panic!("{other:?}"),
    }
}
