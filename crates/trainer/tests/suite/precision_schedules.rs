//! High precision, FP8, high precision in one run: the switches are at the right steps.

use crate::common::run_config as config;
use crate::common::*;

#[test]
fn a_run_switches_by_steps_and_shares_and_evaluates_as_its_last_step_ran() {
    let folder = text();
    for (schedule, switches, float8, last_is_float8) in [
        ("{ warmup = 3 }", vec![(1, "high precision"), (4, "FP8")], 5, true),
        ("{ cooldown = 0.25 }", vec![(7, "high precision")], 6, false),
        ("{ warmup = 0.25, cooldown = 1 }", vec![(1, "high precision"), (3, "FP8"), (8, "high precision")], 5, false),
    ] {
        let schedule = format!("float8.schedule={schedule}");
        let config = config(folder.path(), &[&schedule, "training.steps=8"]);
        let (outcome, log) = run(&config).unwrap();
        let lines: Vec<_> = log.lines().filter(|line| line.contains("linears switch")).collect();
        let expected: Vec<_> = switches
            .iter()
            .map(|(step, precision)| format!("step: {step:2}  linears switch to {precision} (float8.schedule)"))
            .collect();
        assert_eq!(lines, expected, "{log}");
        for layer in outcome.report.layers.iter().filter(|layer| layer.is_float8) {
            let high = 8 - float8;
            let calls = layer.gemms().map(|(_, gemm)| (gemm.emulated, gemm.high_precision));
            assert_eq!(calls, [(float8, high); 3], "{}", layer.name);
            assert_eq!(layer.dgrad.reason.as_deref(), Some("precision schedule"));
        }
        let data = open(&config);
        let (made, _) = advance(steps(&config, &data, |model| model), 8);
        let held_out = config.held_out_batches(&data).unwrap();
        let loss = |is_float8: bool| {
            set_float8_enabled(&*made.model, is_float8);
            mean_loss(&made.model.valid(), &held_out, &config.training, &Default::default()).unwrap()
        };
        assert_eq!(outcome.validation_loss, Some(loss(last_is_float8)));
        assert_ne!(outcome.validation_loss, Some(loss(!last_is_float8)));
    }
    // Without FP8 the schedule has no effect.
    let f32_run = ["training.precision=f32", "float8.schedule={ warmup = 3 }", "training.steps=4"];
    let (_, log) = run(&config(folder.path(), &f32_run)).unwrap();
    assert!(!log.contains("linears switch"), "{log}");
}
