//! The report as a file and as a table; strict runs.

use crate::common::run_config as config;
use crate::common::*;

#[test]
fn the_report_file_says_what_each_linear_did() {
    let (data, dir) = (text(), tempfile::tempdir().unwrap());
    let path = dir.path().join("report.json");
    fs::write(&path, "an older one").unwrap();
    let statistics = ["float8.statistics={ every_n_steps = 4, compare = ['rowwise'] }", "training.steps=6"];
    let mut config = config(data.path(), &statistics);
    config.fp8_report = Some(Some(path.clone()));
    let (outcome, log) = run(&config).unwrap();
    assert!(log.contains(&format!("report: {}\n", path.display())), "{log}");
    assert!(!log.contains("never called") && !log.contains("amax"), "the table was not asked for: {log}");
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1, "nothing else is left behind");

    let text = fs::read_to_string(&path).unwrap();
    assert!(text.starts_with("{\n  \"layers\": [\n") && text.ends_with("}\n"), "{text}");
    assert_eq!(serde_json::from_str::<burn_float8::Report>(&text).unwrap(), outcome.report);
    let of = |name: &str| outcome.report.layers.iter().find(|layer| layer.name == name).unwrap();
    let (q_proj, lm_head) = (of("layers.0.self_attn.q_proj"), of("lm_head"));
    assert_eq!((q_proj.fprop.emulated, q_proj.fprop.path.as_deref(), lm_head.is_float8), (6, Some("host"), false));
    assert_eq!(lm_head.dgrad.reason.as_deref(), Some("filter \"lm_head\""));
    let weight = &serde_json::to_value(q_proj).unwrap()["fprop"]["operands"][1];
    let number = |pointer: &str| weight.pointer(pointer).and_then(Value::as_f64).unwrap();
    assert!(number("/amax") > 0.0 && number("/scale") > 0.0 && number("/health/cast/sqnr_db") > 20.0, "{weight}");
}

#[test]
fn a_report_is_printed_when_asked_for() {
    let data = text();
    let with_report = |settings: &[&str]| RunConfig { fp8_report: Some(None), ..config(data.path(), settings) };
    let (outcome, log) = run(&with_report(&["training.steps=2"])).unwrap();
    assert!(log.ends_with(&format!("{}\n", outcome.report)), "{log}");
    assert!(log.contains("layers.1.mlp.down_proj") && log.contains("padding"), "{log}");
    assert_eq!(log.matches("GEMMs: ").count(), 1, "{log}");
    assert!(log.ends_with(&format!("{}\n", outcome.gemms)), "{log}");
    // For f32, an empty report shows that nothing ran in FP8.
    let (outcome, log) = run(&with_report(&["training.steps=2", "training.precision=f32"])).unwrap();
    assert!(outcome.report.layers.is_empty() && log.contains("no linear was converted to FP8"), "{log}");
}

#[test]
fn a_report_that_cannot_be_written_stops_the_run_before_it_trains() {
    let data = text();
    for path in [data.path().join("no/such/folder/report.json"), data.path().into(), Path::new("/").into()] {
        let mut config = config(data.path(), &["training.steps=1000000000"]);
        config.fp8_report = Some(Some(path.clone()));
        assert_eq!(run(&config).unwrap_err().to_string(), format!("cannot write {}", path.display()));
    }
}

/// Run with hidden states in `dtype`, which the config does not contain, and its log.
fn in_dtype(config: &RunConfig, dtype: DType) -> (Result<Outcome, Error>, String) {
    let data = open(config);
    let held_out = config.held_out_batches(&data).unwrap();
    let steps = steps(config, &data, |model| model.with_compute_dtype(dtype));
    let mut log = Vec::new();
    let run = Run {
        config: config.steps(),
        selected: &SelectedDevice::Cpu,
        device: &Default::default(),
        held_out: &held_out,
        checkpoints: None,
        profiler: None,
        metrics: None,
        signals: Signals::default(),
        progress: ProgressLine::hidden(),
        out: &mut log,
    };
    let outcome = finish::<Decoders, _, _>(config, &bytes(), false, run, steps, |model| model);
    (outcome, String::from_utf8(log).unwrap())
}

#[test]
fn strict_runs_refuse_high_precision_that_nobody_asked_for() {
    let data = text();
    let config = |settings: &[&str]| config(data.path(), &[&["training.steps=3"], settings].concat());
    // f64 has no FP8 cast. A run fails after its first step; an evaluation fails at the end.
    for steps in [3, 0] {
        let (result, log) = in_dtype(&config(&["float8.strict=true", &format!("training.steps={steps}")]), DType::F64);
        match cause(result) {
            RunError::Strict(Float8Error::UnrequestedHighPrecision { layer, gemm: Gemm::Fprop, reason }) => {
                assert_eq!((layer.as_str(), reason.as_str()), ("layers.0.self_attn.q_proj", "dtype F64"));
            }
            other => panic!("{other:?}"),
        }
        assert!(!log.contains("step: ") && log.contains("GEMMs: 0 in FP8") == (steps == 0), "{log}");
    }
    let loose = in_dtype(&config(&[]), DType::F64).0.unwrap();
    assert_eq!(loose.gemms.emulated, 0);
    assert!(loose.report.verify().is_err());
    for dtype in [DType::F32, DType::BF16] {
        in_dtype(&config(&["float8.strict=true"]), dtype).0.unwrap();
    }
    // High precision requested by the config is not an error.
    let asked_for = [
        "float8.strict=true",
        "float8.recipe=rowwise_with_gw_hp",
        "float8.filter_fqns=['lm_head', 'k_proj']",
        "float8.schedule={ warmup = 1, cooldown = 1 }",
    ];
    let (outcome, _) = run(&config(&asked_for)).unwrap();
    assert!(outcome.gemms.emulated > 0);
    let error = RunError::Strict(Float8Error::NeverCalled { layer: "lm_head".into(), weight_matmuls: 0 });
    assert_eq!(error.to_string(), "float8.strict: lm_head: converted to FP8, but never called as a linear");
}
