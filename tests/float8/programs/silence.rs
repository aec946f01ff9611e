//! burn-float8 prints nothing and only logs. In its own process, for its logger and its output.
use std::sync::Mutex;

use burn_float8::{FallbackConfig, Float8Config, Recipe, StatisticsConfig, report};
use log::{Level, LevelFilter, Log, Metadata, Record};

use crate::programs::support::learner::{fit, trainable};
use crate::programs::support::models::{D, Mlp};
use crate::programs::support::{B, mean_square, own_report, panic_of, tensor, train, with_parameters, x};
use crate::support::process::alone;

struct Collect(Mutex<Vec<(Level, String)>>);

static LOGGER: Collect = Collect(Mutex::new(vec![]));

impl Log for Collect {
    fn enabled(&self, _: &Metadata<'_>) -> bool {
        true
    }
    fn log(&self, record: &Record<'_>) {
        if record.target().starts_with("burn_float8") {
            self.0.lock().unwrap().push((record.level(), record.args().to_string()));
        }
    }
    fn flush(&self) {}
}

/// Applies, trains, falls back, reports, and trains with burn-train.
fn program() {
    log::set_logger(&LOGGER).unwrap();
    log::set_max_level(LevelFilter::Info);
    // A limit beyond FP8: every layer falls back.
    let fallback = FallbackConfig { min_sqnr_db: Some(150.0), ..Default::default() };
    let config = Float8Config::new(Recipe::Delayed)
        .with_filter_fqns(["second"])
        .with_statistics(StatisticsConfig::every(1))
        .with_fallback(fallback);
    let model: Mlp<B> = with_parameters(Mlp::new(), 1);
    let model = config.apply(model).unwrap().0;
    let (model, _) = train(model, 0..3, |m, step| mean_square(m.forward(x(step))));
    assert!(own_report(&model).layers[0].fallback.is_some());
    assert!(report(&model).to_string().contains("first"));
    std::panic::set_hook(Box::new(|_| ()));
    panic_of(|| drop(model.first.forward(tensor::<B, 2>([6, D + 1], 1))));
    drop(std::panic::take_hook());
    let folder = tempfile::tempdir().unwrap();
    fit(trainable(&Float8Config::new(Recipe::Delayed), 1), folder.path(), 2, |training| training);

    let logged = LOGGER.0.lock().unwrap();
    let summary = "Applied Float8: recipe=delayed, 1 of 2 linears; skipped: second (filter \"second\")";
    assert_eq!(logged[0], (Level::Info, summary.to_string()));
    let warnings: Vec<_> = logged.iter().filter(|(level, _)| *level == Level::Warn).collect();
    assert_eq!(warnings.len(), 1, "one layer falls back, once: {warnings:?}");
    assert!(warnings[0].1.contains("first") && warnings[0].1.contains("SQNR"), "{warnings:?}");
    assert!(logged.iter().all(|(level, _)| *level >= Level::Warn), "no errors: {logged:?}");
}

/// Only the test harness prints.
#[test]
fn nothing_is_printed() {
    let Some(printed) = alone(module_path!(), "nothing_is_printed", &[], program) else { return };
    assert_eq!(printed.stderr, "");
    let is_harness = |line: &str| {
        line.is_empty()
            || line == "running 1 test"
            || line == "test programs::silence::nothing_is_printed ... ok"
            || line.starts_with("test result: ok. 1 passed")
    };
    let others: Vec<_> = printed.stdout.lines().filter(|line| !is_harness(line)).collect();
    assert_eq!(others, Vec::<&str>::new());
}
