//! `[float8]`: every key of `Float8Config` can be set in files and settings; invalid values are
//! named.

use std::fs;
use std::path::Path;

use anyhow::Error;
use burn_float8::{
    FallbackConfig, Float8Config, Float8LinearConfig, PrecisionSchedule, Recipe, Span, StatisticsConfig,
    config::{
        AmaxComputeAlgo, CastConfig, DelayedScaling, FallbackTo, Format, Granularity, Operand, ScaleCalculationMode,
    },
    report::Gemm,
};
use clap::Parser;
use models::RunConfig;
use toml::{Table, Value};
use trainer::cli::Args;
use trainer::config::ConfigError;
use trainer::config::Float8Section;

use crate::common::{cause, tiny};

fn set(settings: &[&str]) -> Result<RunConfig, Error> {
    let settings: Vec<_> = settings.iter().map(|s| s.to_string()).collect();
    RunConfig::load(None, &settings)
}

fn file(text: &str) -> Result<RunConfig, Error> {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("run.toml");
    fs::write(&path, text).unwrap();
    RunConfig::load(Some(&path), &[])
}

fn args(arguments: &[&str]) -> Result<RunConfig, Error> {
    Args::try_parse_from([&["llama3_fp8"], arguments].concat()).unwrap().run_config()
}

/// Configuration that differs from the default in every key.
fn everything() -> Float8Config {
    let mut casts = Recipe::Delayed.casts();
    casts[Operand::INPUT] = CastConfig::dynamic(Granularity::Block1x32, Format::E5m2);
    casts[Operand::INPUT_T] = CastConfig::dynamic(Granularity::Block1x128, Format::E5m2);
    let delayed = DelayedScaling { amax_history_len: 16, amax_compute_algo: AmaxComputeAlgo::MostRecent, margin: 1 };
    let linear = Float8LinearConfig::new(Recipe::Delayed)
        .with_casts(casts)
        .with_delayed_scaling(delayed)
        .with_use_fast_accum(Gemm::Fprop, true)
        .with_use_fast_accum(Gemm::Dgrad, true)
        .with_use_fast_accum(Gemm::Wgrad, true)
        .with_round_scales_to_power_of_2(true)
        .with_scale_calculation_mode(ScaleCalculationMode::Floor)
        .with_emulate(true)
        .with_force_recompute_fp8_weight_in_bwd(true);
    let fallback = FallbackConfig {
        min_sqnr_db: Some(20.0),
        max_saturated: Some(0.25),
        max_flushed: Some(0.5),
        to: FallbackTo::Rowwise,
        max_non_finite: None,
    };
    Float8Config::from(linear)
        .with_filter_fqns(["k_proj"])
        .with_auto_filter_small_kn(true)
        .with_layers_in_high_precision(1, 2)
        .with_override(["*.down_proj"], Float8LinearConfig::new(Recipe::Rowwise))
        .with_strict(true)
        .with_statistics(StatisticsConfig::every(10).with_compare([Recipe::Rowwise]))
        .with_fallback(fallback)
}

#[test]
fn every_key_reaches_float8_config() {
    let expected = everything();
    let keys = Table::try_from(&expected).unwrap();
    let plain = Table::try_from(Float8Config::default()).unwrap();
    assert!(keys.len() >= 20 && plain.len() <= 1, "only what differs from the default is written: {keys} {plain}");
    // From a file.
    let text = Table::from_iter([("float8".to_string(), Value::Table(keys.clone()))]).to_string();
    assert_eq!(file(&text).unwrap().float8(&tiny()), expected);
    // Key by key, in an order in which some keys are valid only with later ones.
    let settings: Vec<_> = keys.iter().map(|(key, value)| format!("float8.{key}={value}")).collect();
    for settings in [settings.clone(), settings.into_iter().rev().collect()] {
        assert_eq!(RunConfig::load(None, &settings).unwrap().float8(&tiny()), expected, "{settings:?}");
    }
}

#[test]
fn a_schedule_is_steps_or_shares() {
    let schedule = |settings: &[&str]| set(settings).unwrap().float8;
    let float8 = schedule(&["float8.schedule={ warmup = 100, cooldown = 0.1 }"]);
    let runs: Vec<_> = [0, 99, 100, 899, 900, 999].map(|step| float8.is_float8(step, 1000)).into();
    assert_eq!(runs, [false, false, true, true, false, false]);
    assert!(float8.config == Float8Config::default() && float8.filter_fqns.is_none());
    let float8 = schedule(&["float8.schedule.cooldown=0.25"]);
    assert!(float8.is_float8(0, 8) && float8.is_float8(5, 8) && !float8.is_float8(6, 8));
    assert!(schedule(&[]).is_float8(0, 1));
}

#[test]
fn wrong_keys_and_values_are_named_with_where_they_came_from() {
    for (setting, named) in [
        ("float8.recip=rowwise", "recip"),
        ("float8.recipe=nibblewise", "nibblewise"),
        ("float8.emulate=3", "emulate"),
        ("float8.scale_calculation_mode=floor", "scale_calculation_mode = floor with recipe rowwise"),
        ("float8.strict=maybe", "strict"),
        ("float8.filter_fqns=lm_head", "filter_fqns"),
        ("float8.schedule=5", "schedule"),
        ("float8.schedule={ warmup = 1.5 }", "schedule.warmup"),
        ("float8.schedule={ warmup = -1 }", "schedule.warmup"),
        ("float8.schedule={ warmpu = 1 }", "warmpu"),
        ("float8.statistics={ every_n_steps = 0 }", "every_n_steps"),
        ("float8.statistics={ every = 1 }", "every"),
        ("float8.fallback={ min_sqnr_db = 20 }", "statistics"),
        ("float8.delayed_scaling={ margin = 99 }", "margin"),
        ("float8.delayed_scaling.amax_history=99", "amax_history"),
        ("float8.gemm_config_output.fast=true", "fast"),
        ("float8.cast_config_input={ scaling_granularity = 'rowwise' }", "target_dtype"),
        ("float8.cast_config_grad_output.scaling_type=disabled", "cast_config_grad_output"),
        ("float8.overrides=[{ fqn = ['a'] }]", "overrides"),
        ("float8.num_layers_at_start_in_high_precision=-1", "num_layers_at_start_in_high_precision"),
    ] {
        match cause(set(&["float8.recipe=rowwise", setting])) {
            ConfigError::Parse { origin, reason } => {
                assert_eq!(origin, format!("--set {setting}"));
                assert!(reason.contains(named), "{setting}: {reason}");
            }
            other => panic!("{setting}: {other:?}"),
        }
    }
    let error = file("[float8]\nrecip = 'rowwise'\n").unwrap_err().to_string();
    assert!(error.contains("run.toml: ") && error.contains("unknown field `recip`"), "{error}");
}

#[test]
fn settings_are_judged_together_and_the_first_wrong_one_is_blamed() {
    // Each setting alone configures only half of a GEMM.
    let halves = [
        "float8.cast_config_grad_output={ scaling_type = 'disabled', scaling_granularity = 'rowwise', target_dtype = 'e4m3' }",
        "float8.cast_config_weight_for_grad_input={ scaling_type = 'disabled', scaling_granularity = 'rowwise', target_dtype = 'e4m3' }",
        "float8.cast_config_grad_output_for_grad_weight={ scaling_granularity = 'rowwise', target_dtype = 'e4m3' }",
    ];
    set(&halves).unwrap();
    let wrong = set(&["training.steps=1", halves[0], halves[2], "training.seed=2"]);
    let ConfigError::Parse { origin, reason } = cause(wrong) else { panic!("another error") };
    assert_eq!(origin, format!("--set {}", halves[0]));
    assert!(reason.contains("dgrad"), "{reason}");
}

#[test]
fn the_recipe_flag_comes_last() {
    let recipe = |arguments: &[&str]| args(arguments).unwrap().float8.config.linear.recipe();
    assert_eq!(recipe(&["--recipe", "blockwise", "--set", "float8.recipe=rowwise"]), Recipe::Blockwise);
    for expected in Recipe::ALL {
        assert_eq!(recipe(&["--recipe", &expected.to_string()]), expected);
    }
    let unknown = Args::try_parse_from(["llama3_fp8", "--recipe", "nibblewise"]).unwrap_err().to_string();
    assert!(unknown.contains("rowwise_with_gw_hp"), "{unknown}");
    // The other keys are kept and interpreted under the new recipe.
    let kept = args(&["--set", "float8.emulate=true", "--recipe", "rowwise"]).unwrap().float8.config;
    assert_eq!(kept.linear, Float8LinearConfig::new(Recipe::Rowwise).with_emulate(true));
    // Validated with the final recipe.
    let mode = "float8.scale_calculation_mode=even";
    let kept = args(&["--set", mode, "--recipe", "mxfp8"]).unwrap().float8.config.linear;
    assert_eq!(kept.scale_calculation_mode(), ScaleCalculationMode::Even);
    let cast = "float8.cast_config_input_for_grad_weight={ scaling_granularity = 'rowwise', target_dtype = 'e4m3' }";
    for (arguments, blamed, says) in [
        (&["--set", cast, "--recipe", "rowwise_with_gw_hp"][..], "--recipe rowwise_with_gw_hp", "wgrad"),
        (
            &["--set", "float8.recipe=mxfp8", "--set", mode, "--recipe", "blockwise"],
            "--recipe blockwise",
            "scale_calculation_mode = even with recipe blockwise",
        ),
        (
            &["--set", mode, "--recipe", "rowwise"],
            "--set float8.scale_calculation_mode=even",
            "scale_calculation_mode = even with recipe rowwise",
        ),
    ] {
        let contradiction = args(arguments);
        let ConfigError::Parse { origin, reason } = cause(contradiction) else { panic!("{arguments:?}") };
        assert_eq!(origin, blamed);
        assert!(reason.contains(says), "{reason}");
    }
}

#[test]
fn a_recipe_without_fp8_is_a_contradiction() {
    for precision in ["bf16", "f32"] {
        let error = args(&["--precision", precision, "--recipe", "rowwise"]).unwrap_err().to_string();
        let expected = format!("--recipe rowwise: contradicts precision {precision}, in which nothing runs in FP8");
        assert_eq!(error, expected);
        let setting = "float8.recipe=rowwise";
        let error = args(&["--precision", precision, "--set", setting]).unwrap_err().to_string();
        assert!(error.starts_with(&format!("--set {setting}: contradicts precision {precision}")), "{error}");
    }
    // One flag gives the baseline of a file with a recipe.
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("run.toml");
    fs::write(&path, "[float8]\nrecipe = 'rowwise'").unwrap();
    args(&["--precision", "bf16", "--config", path.to_str().unwrap()]).unwrap();
}

#[test]
fn an_unknown_key_suggests_the_known_one() {
    let error = |text: &str| file(text).unwrap_err().to_string();
    let similar = error("[training]\nbatchsize = 4");
    assert!(similar.contains("did you mean `batch_size`?"), "{similar}");
    assert!(!error("[training]\nxyz = 4").contains("did you mean"));
}

#[test]
fn a_printed_configuration_is_read_back() {
    let section = "schedule = { warmup = 1, cooldown = 0.1 }\nfilter_fqns = []\nrecipe = 'blockwise'";
    let of_file = file(&format!("[float8]\n{section}\n[training]\ngrad_clip_norm = inf\n[data]\ntokenizer = 'bytes'"));
    let moe = file("[model]\noverrides = { num_experts = 4, num_experts_per_tok = 2, rope_theta = 2e6 }");
    let float8 = Float8Section {
        config: everything().with_filter_fqns([] as [&str; 0]),
        filter_fqns: Some(vec!["k_proj".into()]),
        schedule: Some(PrecisionSchedule::new(Span::Steps(100), Span::Fraction(0.1)).unwrap()),
    };
    let all = RunConfig { float8, ..RunConfig::default() };
    for config in [RunConfig::default(), of_file.unwrap(), moe.unwrap(), all] {
        let text = config.to_toml().unwrap();
        assert_eq!(file(&text).unwrap(), config, "{text}");
    }
}

#[test]
fn a_report_is_a_table_or_a_file() {
    for (arguments, expected) in
        [(&[][..], None), (&["--fp8-report"], Some(None)), (&["--fp8-report=r.json"], Some(Some("r.json".into())))]
    {
        assert_eq!(args(arguments).unwrap().fp8_report, expected);
    }
}

#[test]
fn the_examples_in_the_debug_config_are_right() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../configs/llama3_debug.toml");
    let text = fs::read_to_string(path).unwrap();
    let section = text.split("\n[").find(|section| section.starts_with("float8]")).unwrap();
    // Lines of the form `# key = value`.
    let example = |line: &str| {
        let line = line.strip_prefix("# ")?;
        let key = line.split_once(" = ")?.0;
        let is_key = key.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_');
        is_key.then(|| line.to_string())
    };
    let examples: Vec<_> = section.lines().filter_map(example).collect();
    let all = file(&format!("[float8]\n{}", examples.join("\n"))).unwrap();
    assert!(all.float8.schedule.is_some() && all.float8.filter_fqns.is_some());
    // Every key that differs from the default in `everything` has an example.
    let mut keys: Vec<_> = Table::try_from(everything()).unwrap().keys().cloned().collect();
    keys.push("schedule".into());
    for key in keys.iter().filter(|key| *key != "recipe") {
        assert!(examples.iter().any(|line| line.starts_with(&format!("{key} = "))), "{key} has no example");
    }
}
