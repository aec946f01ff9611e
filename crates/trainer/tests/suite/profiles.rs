//! `training.profile_steps` on the CPU: FP8 work has separate rows, and losses are unchanged.

use crate::common::*;
use burn_float8::Report;

const VARIABLE: &str = "LLAMA3_PROFILE";

/// Casts of x, w and dy, and FP8 GEMMs of fprop, dgrad and wgrad, over all linears.
fn counts(report: &Report) -> ([u64; 3], [u64; 3]) {
    let layers = |of: fn(&LayerReport) -> u64| report.layers.iter().map(of).sum();
    let fp8 = |of: fn(&LayerReport) -> &GemmReport| report.layers.iter().map(|layer| of(layer).emulated).sum();
    let casts = [layers(|layer| layer.casts[0]), layers(|layer| layer.casts[1]), layers(|layer| layer.casts[2])];
    (casts, [fp8(|layer| &layer.fprop), fp8(|layer| &layer.dgrad), fp8(|layer| &layer.wgrad)])
}

/// Calls in rows whose names begin with `name`.
fn calls(table: &ProfileTable, name: &str) -> u64 {
    table.rows.iter().filter(|row| row.name.starts_with(name)).map(|row| row.calls).sum()
}

/// Profiles the third and the fourth of five steps. Concurrent work of other tests in the process
/// would be counted.
fn window(config: &RunConfig, has_fp8_wgrad: bool) {
    let device = Default::default();
    let mut profiler = Profiler::prepare::<Train>([3, 4], None, &SelectedDevice::Cpu, &device).unwrap();
    let mut run = steps(config, &open(config), |model| model);
    let (mut before, mut tables) = (None, vec![]);
    for step in 1..=5 {
        if step == 3 {
            before = Some(counts(&report_of::<Train, _>(&*run.model)));
        }
        profiler.before_step::<Train>(step, &device).unwrap();
        run.step(&device).unwrap();
        if let Some(table) = profiler.after_step::<Train>(step, &device).unwrap() {
            tables.push((table, counts(&report_of::<Train, _>(&*run.model))));
        }
    }
    let [(table, after)] = &tables[..] else { panic!("{} tables", tables.len()) };
    let before = before.unwrap();
    assert_eq!((table.first_step, table.steps, &*table.device), (3, 2, "cpu"));
    for (i, role) in ["input", "weight", "grad_output"].into_iter().enumerate() {
        let reported = after.0[i] - before.0[i];
        assert!(reported > 0 && calls(table, &format!("cast {role} e")) == reported, "{role}: {reported}\n{table}");
    }
    for (i, gemm) in ["fprop", "dgrad", "wgrad"].into_iter().enumerate() {
        let reported = after.1[i] - before.1[i];
        let is_fp8 = gemm != "wgrad" || has_fp8_wgrad;
        assert!((reported > 0) == is_fp8, "{gemm}: {reported}");
        assert_eq!(calls(table, &format!("scaled_gemm {gemm}")), reported, "{gemm}\n{table}");
    }
    // The output layer is in high precision; the optimizer is one pass.
    let beside = ["attention", "swiglu", "rms_norm", "rotary", "log_likelihood"];
    let backward = beside.map(|name| format!("{name}_backward"));
    let others = ["linear", "linear_x_backward", "linear_weight_backward", "adamw"];
    for name in beside.into_iter().chain(backward.iter().map(|name| &**name)).chain(others) {
        assert!(table.rows.iter().any(|row| row.name == name && row.calls > 0 && row.kind == RowKind::Other), "{name}");
    }
    let sum: f64 = table.rows.iter().map(|row| row.seconds).sum();
    assert!(table.wall_seconds > 0.0 && (sum / table.wall_seconds - 1.0).abs() < 1e-9, "{sum}\n{table}");
    assert!(
        table.rows.iter().all(|row| row.seconds >= 0.0 && (row.calls > 0) == (row.kind != RowKind::Host)),
        "{table}"
    );
    assert!(table.seconds(RowKind::Cast) > 0.0 && table.seconds(RowKind::ScaledGemm) > 0.0, "{table}");
    let shown = table.to_string();
    assert!(shown.contains("cast input e4m3\n") && shown.contains("scaled_gemm fprop\n"), "{shown}");
}

#[test]
fn calls_are_those_that_the_report_counts() {
    if let Some(folder) = env::var_os(VARIABLE) {
        for settings in [
            &["float8.recipe=tensorwise"][..],
            &["float8.recipe=rowwise_with_gw_hp", "training.grad_accumulation=2"],
            &["float8.recipe=delayed"],
            &["float8.recipe=mxfp8", "float8.statistics={ every_n_steps = 1, compare = ['rowwise'] }"],
        ] {
            window(&run_config(Path::new(&folder), settings), !settings[0].ends_with("_hp"));
        }
        return;
    }
    run_alone("profiles::calls_are_those_that_the_report_counts", VARIABLE, text().path());
}

#[test]
fn a_run_says_where_the_time_went_and_its_losses_stay() {
    let data = text();
    let folder = tempfile::tempdir().unwrap();
    let saved = saved(folder.path().join("run"));
    let (plain, log) = run(&run_config(data.path(), &["training.log_every=1", "training.steps=5"])).unwrap();
    assert!(!log.contains("profile:"), "{log}");
    let settings = ["training.log_every=1", "training.steps=5", "training.profile_steps=[2, 4]", &saved];
    let (profiled, log) = run(&run_config(data.path(), &settings)).unwrap();
    let losses = |outcome: &trainer::job::Outcome| {
        let bits = outcome.steps.iter().map(|line| (line.loss.to_bits(), line.grad_norm.to_bits()));
        (bits.collect::<Vec<_>>(), outcome.validation_loss.map(f64::to_bits), outcome.sample.clone())
    };
    assert_eq!(losses(&plain), losses(&profiled));
    let at = |what: &str| log.find(what).unwrap_or_else(|| panic!("no {what:?} in\n{log}"));
    assert!(at("step:  3  loss") < at("profile: steps 2 to 4 on cpu, "), "{log}");
    assert!(at("profile: ") < at("step:  4  loss") && log.matches("profile: ").count() == 1, "{log}");
    assert!(at("scaled_gemm wgrad") < at("\nsum of wall:  cast "), "{log}");
    let json: Value =
        serde_json::from_str(&fs::read_to_string(folder.path().join("run/profile.json")).unwrap()).unwrap();
    let timing = &"of each call, on the host".into();
    assert_eq!((&json["first_step"], &json["steps"], &json["timing"]), (&2.into(), &3.into(), timing));
    let rows = json["rows"].as_array().unwrap();
    assert!(rows.iter().any(|row| row["name"] == "cast grad_output e5m2" && row["kind"] == "cast"), "{json}");
}
