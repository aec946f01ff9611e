//! burn-train's learner: it trains, checkpoints, resumes with the FP8 state in the model's record, and
//! runs on two devices.
use burn_float8::{Float8Config, Float8State, Recipe};
use burn_train::checkpoint::KeepLastNCheckpoints;
use burn_train::{ExecutionStrategy, MultiDeviceOptim};

use crate::programs::support::learner::{fit, trainable};
use crate::programs::support::{B, float8_calls, own_report};

/// One device, and two workers on one CPU, whose losses arrive in any order.
#[test]
fn the_learner_trains() {
    let run = |recipe, devices: usize| {
        let folder = tempfile::tempdir().unwrap();
        let model = trainable(&Float8Config::new(recipe).with_strict(true), 1);
        let ([mut train, valid], trained) = fit(model, folder.path(), 5, |training| {
            let devices = vec![Default::default(); devices];
            let strategy = ExecutionStrategy::<B>::multi(devices, MultiDeviceOptim::OptimMainDevice);
            training.with_training_strategy(strategy.into())
        });
        train.chunks_mut(devices).for_each(|losses| losses.sort_by(f64::total_cmp));
        // Each device has its part of the rows, in batches of three.
        assert_eq!((train.len(), valid.len()), (5 * 4, 5 * 2));
        let report = own_report(&trained);
        for l in &report.layers {
            // Training batches, and the forwards of validation.
            assert_eq!([float8_calls(l)[0], float8_calls(l)[2]], [5 * 4 + 5 * 2, 5 * 4], "{recipe} {}", l.name);
            assert_eq!(l.totals().high_precision, 0, "{recipe} {}", l.name);
        }
        report.verify().unwrap();
        // The last validation has begun the next step.
        assert_eq!(Float8State::export(&trained.net).step, 5 * 4 / devices as u64 + 1, "{recipe}");
        (train, valid)
    };
    for (recipe, devices) in [Recipe::Tensorwise, Recipe::Delayed].into_iter().flat_map(|r| [(r, 1), (r, 2)]) {
        let (train, valid) = run(recipe, devices);
        let sum = |losses: &[f64]| losses.iter().sum::<f64>();
        assert!(sum(&train[16..]) < 0.9 * sum(&train[..4]), "{recipe}");
        assert_eq!(run(recipe, devices), (train, valid), "{recipe}: whichever worker is first");
    }
}

/// Four epochs without interruption equal two epochs and two more in a new model restored from the
/// checkpoint.
#[test]
fn a_resumed_run_goes_on_bit_for_bit() {
    let new = |seed| trainable(&Float8Config::new(Recipe::Delayed), seed);
    let [whole, parts] = [(); 2].map(|()| tempfile::tempdir().unwrap());
    let keep = || KeepLastNCheckpoints::new(4);
    let (uninterrupted, _) = fit(new(1), whole.path(), 4, |t| t.with_checkpointing_strategy(keep()));
    let (first, _) = fit(new(1), parts.path(), 2, |t| t.with_checkpointing_strategy(keep()));
    let (resumed, _) = fit(new(2), parts.path(), 4, |t| t.with_checkpointing_strategy(keep()).checkpoint(2));
    let half = |i| uninterrupted.each_ref().map(|losses| losses.chunks(losses.len() / 2).nth(i).expect("two").to_vec());
    assert_eq!([first, resumed], [half(0), half(1)]);
}
