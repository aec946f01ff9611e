//! Configurations: files, filters, rules between casts, and their errors.
use burn::nn::{Linear, LinearConfig};
use burn_float8::{
    FallbackConfig, Float8, Float8Config, Float8Error, Float8LinearConfig, Recipe, StatisticsConfig,
    config::{
        AmaxComputeAlgo, CastConfig, Casts, DelayedScaling, FallbackTo, Format, Granularity, Operand,
        ScaleCalculationMode, ScaleMode, Untagged,
    },
    report::{Gemm, Summary},
};

use crate::support::model::Model;
use crate::support::runtime::Flex;

type B = Float8<Flex>;

fn parse(text: &str) -> Result<Float8Config, serde_json::Error> {
    serde_json::from_str(text)
}

fn summary(config: &Float8Config, blocks: usize) -> Result<Summary, Float8Error> {
    Ok(config.apply(Model::<B>::new(blocks)).map(|(_, summary)| summary)?)
}

fn skipped(config: &Float8Config, blocks: usize) -> Vec<String> {
    summary(config, blocks).unwrap().skipped.into_iter().map(|(name, _)| name).collect()
}

#[test]
fn recipes_are_torchaos() {
    use Granularity::{Block1x32, Block1x128, Block128x128, Row, Tensor};
    for (recipe, operand, granularity, format) in [
        (Recipe::Tensorwise, Operand::WEIGHT, Tensor, Format::E4m3),
        (Recipe::Tensorwise, Operand::GRAD_OUTPUT_T, Tensor, Format::E5m2),
        (Recipe::RowwiseWithGwHp, Operand::WEIGHT_T, Row, Format::E4m3),
        (Recipe::RowwiseWithGwHp, Operand::WEIGHT, Tensor, Format::E4m3),
        (Recipe::RowwiseWithGwHp, Operand::GRAD_OUTPUT, Row, Format::E4m3),
        (Recipe::Blockwise, Operand::INPUT_T, Block1x128, Format::E4m3),
        (Recipe::Blockwise, Operand::WEIGHT_T, Block128x128, Format::E4m3),
    ] {
        assert_eq!(recipe.casts()[operand], CastConfig::dynamic(granularity, format), "{recipe} {operand:?}");
    }
    let mx = CastConfig::dynamic(Block1x32, Format::E4m3);
    let mx = Casts::new(mx, mx, mx);
    assert_eq!((Recipe::Mxfp8.casts(), Recipe::Mxfp8WgradWithHp.casts()), (mx, mx.without(Gemm::Wgrad)));
    let gw_hp = Recipe::RowwiseWithGwHp.casts();
    assert!(gw_hp[Operand::INPUT_T].is_disabled() && gw_hp[Operand::GRAD_OUTPUT_T].is_disabled());
    let modes =
        Recipe::ALL.map(|r| Float8LinearConfig::new(r).scale_mode(r.casts()[Operand::INPUT].scaling_granularity));
    use ScaleMode::{F32, PowerOfTwo};
    let e8m0 = ScaleMode::E8m0(ScaleCalculationMode::Rceil);
    assert_eq!(modes, [F32, PowerOfTwo, PowerOfTwo, F32, F32, e8m0, e8m0]);
    assert!(Recipe::ALL.iter().all(|recipe| recipe.to_string().parse() == Ok(*recipe)));
}

/// Each cast uses the scale mode of its granularity. The names are torchao's.
#[test]
fn scale_calculation_modes_belong_to_blocks_of_32() {
    let names = ScaleCalculationMode::ALL.map(|mode| mode.to_string());
    assert_eq!(names, ["floor", "ceil", "even", "rceil"]);
    for mode in ScaleCalculationMode::ALL {
        let config = parse(&format!(r#"{{ "recipe": "mxfp8", "scale_calculation_mode": "{mode}" }}"#)).unwrap();
        let linear = Float8LinearConfig::new(Recipe::Mxfp8).with_scale_calculation_mode(mode);
        assert_eq!(config, linear.clone().into());
        assert_eq!(parse(&serde_json::to_string(&config).unwrap()).unwrap(), config);
        assert_eq!(linear.scale_calculation_mode(), mode);
        assert_eq!(linear.scale_mode(Granularity::Block1x32), ScaleMode::E8m0(mode));
        assert_eq!(linear.scale_mode(Granularity::Row), ScaleMode::F32);
        let rounded = linear.clone().with_round_scales_to_power_of_2(true);
        assert_eq!(rounded.scale_mode(Granularity::Block1x32), ScaleMode::E8m0(mode));
        assert_eq!(rounded.scale_mode(Granularity::Row), ScaleMode::PowerOfTwo);
        // The name depends on what differs from the recipe, not on what is set.
        let is_default = mode == ScaleCalculationMode::Rceil;
        let name = if is_default { "mxfp8" } else { "mxfp8 (customized)" };
        assert_eq!((linear.to_string().as_str(), rounded.to_string().as_str()), (name, name));
    }
}

#[test]
fn files_say_all_that_code_can() {
    let config = parse(
        r#"{
            "recipe": "rowwise",
            "cast_config_input": { "scaling_granularity": "1x128", "target_dtype": "e5m2" },
            "cast_config_grad_output": { "scaling_granularity": "1x32", "target_dtype": "e4m3" },
            "cast_config_weight_for_grad_input": { "scaling_granularity": "tensorwise", "target_dtype": "e4m3" },
            "gemm_config_output": { "use_fast_accum": true },
            "round_scales_to_power_of_2": false,
            "scale_calculation_mode": "floor",
            "emulate": true,
            "force_recompute_fp8_weight_in_bwd": true,
            "delayed_scaling": { "amax_history_len": 16, "amax_compute_algo": "most_recent", "margin": 1 },
            "filter_fqns": ["head"],
            "auto_filter_small_kn": true,
            "num_layers_at_start_in_high_precision": 1,
            "num_layers_at_end_in_high_precision": 2,
            "overrides": [{ "fqns": ["*.q"], "config": { "recipe": "mxfp8", "scale_calculation_mode": "even" } }],
            "strict": true,
            "untagged": "error",
            "statistics": { "every_n_steps": 10, "compare": ["rowwise"] },
            "fallback": { "min_sqnr_db": 20.0, "to": "rowwise" }
        }"#,
    )
    .unwrap();
    let input = CastConfig::dynamic(Granularity::Block1x128, Format::E5m2);
    let grad_output = CastConfig::dynamic(Granularity::Block1x32, Format::E4m3);
    let casts = Recipe::Rowwise
        .casts()
        .with(Operand::INPUT, input)
        .with(Operand::GRAD_OUTPUT, grad_output)
        .with(Operand::GRAD_OUTPUT_T, grad_output)
        .with(Operand::INPUT_T, input)
        .with(Operand::WEIGHT, CastConfig::dynamic(Granularity::Tensor, Format::E4m3));
    let amax_compute_algo = AmaxComputeAlgo::MostRecent;
    let delayed = DelayedScaling { amax_history_len: 16, amax_compute_algo, margin: 1 };
    let linear = Float8LinearConfig::new(Recipe::Rowwise)
        .with_casts(casts)
        .with_use_fast_accum(Gemm::Fprop, true)
        .with_round_scales_to_power_of_2(false)
        .with_scale_calculation_mode(ScaleCalculationMode::Floor)
        .with_emulate(true)
        .with_force_recompute_fp8_weight_in_bwd(true)
        .with_delayed_scaling(delayed);
    // The order of builders does not matter.
    let new = || Float8LinearConfig::new(Recipe::Mxfp8);
    let mode = ScaleCalculationMode::Floor;
    let one =
        new().with_delayed_scaling(delayed).with_scale_calculation_mode(mode).with_emulate(true).with_casts(casts);
    assert_eq!(
        one,
        new().with_casts(casts).with_emulate(true).with_scale_calculation_mode(mode).with_delayed_scaling(delayed)
    );
    let fallback = FallbackConfig { min_sqnr_db: Some(20.0), to: FallbackTo::Rowwise, ..FallbackConfig::default() };
    let built = Float8Config::from(linear)
        .with_filter_fqns(["head"])
        .with_auto_filter_small_kn(true)
        .with_layers_in_high_precision(1, 2)
        .with_override(
            ["*.q"],
            Float8LinearConfig::new(Recipe::Mxfp8).with_scale_calculation_mode(ScaleCalculationMode::Even),
        )
        .with_strict(true)
        .with_untagged(Untagged::Error)
        .with_statistics(StatisticsConfig::every(10).with_compare([Recipe::Rowwise]))
        .with_fallback(fallback);
    assert_eq!(config, built);
    // Written and read back, the configuration is equal.
    for config in [built, Float8Config::default(), Float8Config::new(Recipe::RowwiseWithGwHp)] {
        assert_eq!(parse(&serde_json::to_string(&config).unwrap()).unwrap(), config);
    }
    for (name, untagged) in [("high_precision", Untagged::HighPrecision), ("default", Untagged::Default)] {
        let read = parse(&format!(r#"{{ "untagged": "{name}" }}"#)).unwrap();
        assert_eq!(read, Float8Config::default().with_untagged(untagged));
    }
    // The two weight casts differ in this recipe, so setting one leaves the other unchanged.
    let gw_hp = parse(
        r#"{ "recipe": "rowwise_with_gw_hp", "cast_config_weight": { "scaling_granularity": "128x128", "target_dtype": "e4m3" } }"#,
    );
    assert_eq!(gw_hp.unwrap().linear.casts()[Operand::WEIGHT], Recipe::RowwiseWithGwHp.casts()[Operand::WEIGHT]);
}

/// Linears around the size limits of the filter.
#[test]
fn small_linears_are_filtered_by_torchaos_rule() {
    let linear = |[k, n]: [usize; 2]| LinearConfig::new(k, n).with_bias(false).init::<B>(&Default::default());
    let sizes = [4096, 4096, 4097, 1024, 1025, 2048, 2049, 4096];
    let sizes = sizes.into_iter().zip([1024, 1025, 1024, 4097, 4097, 4096, 4096, 2048]).map(|(k, n)| [k, n]);
    let model: Vec<Linear<B>> = sizes.map(linear).collect();
    let summary = |config: Float8Config| config.with_auto_filter_small_kn(true).apply::<B, _>(model.clone()).unwrap().1;
    let names =
        |recipe| summary(Float8Config::new(recipe)).skipped.into_iter().map(|(name, _)| name).collect::<Vec<_>>();
    for recipe in [Recipe::Tensorwise, Recipe::Delayed] {
        assert_eq!(names(recipe), ["0"], "{recipe}");
    }
    let others = [Recipe::Rowwise, Recipe::RowwiseWithGwHp, Recipe::Blockwise, Recipe::Mxfp8, Recipe::Mxfp8WgradWithHp];
    for recipe in others {
        assert_eq!(names(recipe), ["0", "1", "2", "3", "5", "7"], "{recipe}");
    }
    assert_eq!(summary(Float8Config::tensorwise()).skipped[0].1, "small: K=4096 N=1024");
    // The linear's own recipe decides, not the model's.
    let tensorwise = Float8LinearConfig::new(Recipe::Tensorwise);
    let overridden = summary(Float8Config::new(Recipe::Rowwise).with_override(["7"], tensorwise));
    assert!(overridden.converted.contains(&"7".to_string()));
}

#[test]
fn first_and_last_layers_stay_in_high_precision() {
    let config = |start, end| Float8Config::tensorwise().with_layers_in_high_precision(start, end);
    let found = skipped(&config(1, 2), 5);
    let expected: Vec<_> = [0, 3, 4]
        .iter()
        .flat_map(|i| ["q", "k", "v", "o", "gate", "up", "down"].map(|n| format!("blocks.{i}.{n}")))
        .collect();
    assert_eq!(found, expected);
    assert_eq!(summary(&config(1, 0), 5).unwrap().skipped[0].1, "layer 0 of 5");
    // A single linear has no layers to count.
    let linear = LinearConfig::new(4, 4).init::<B>(&Default::default());
    let error = config(1, 0).apply(linear).map(|_| ()).unwrap_err().error.to_string();
    assert!(error.ends_with("= 1 + 0: the names of the model's linears count 0 layers"), "{error}");
}

#[test]
fn patterns_are_exact_names_globs_or_substrings() {
    let filter = |pattern: &str| skipped(&Float8Config::tensorwise().with_filter_fqns([pattern]), 11);
    assert_eq!(filter("blocks.1.q"), ["blocks.1.q"]);
    assert_eq!(filter("s.1.q"), ["blocks.1.q"]);
    assert_eq!(filter("blocks.1*.q"), ["blocks.1.q", "blocks.10.q"]);
    assert_eq!(filter("blocks.1").len(), 14);
    assert_eq!(filter("head"), ["head"]);
    assert_eq!(filter("*.[qkv]").len(), 33);
    // A name is no part of other names.
    let linears: Vec<_> = (0..11).map(|_| LinearConfig::new(4, 4).init::<B>(&Default::default())).collect();
    let named =
        |name: &str| Float8Config::tensorwise().with_filter_fqns([name]).apply(linears.clone()).unwrap().1.skipped;
    assert_eq!(["1", "10"].map(|name| named(name)[0].0.clone()), ["1", "10"]);
    assert_eq!(["1", "10"].map(|name| named(name).len()), [1; 2]);
}

#[test]
fn a_disabled_cast_needs_nothing_else() {
    let off = r#"{ "scaling_type": "disabled" }"#;
    let config = parse(&format!(
        r#"{{ "recipe": "rowwise", "cast_config_grad_output": {off}, "cast_config_weight_for_grad_input": {off},
            "cast_config_grad_output_for_grad_weight": {{ "scaling_granularity": "rowwise", "target_dtype": "e4m3" }} }}"#
    ));
    let casts = config.unwrap().linear.casts();
    assert!(casts[Operand::GRAD_OUTPUT].is_disabled() && casts[Operand::WEIGHT].is_disabled());
    assert!(!casts[Operand::GRAD_OUTPUT_T].is_disabled());
}

#[test]
fn the_last_override_counts() {
    let config = Float8Config::tensorwise()
        .with_override(["blocks"], Float8LinearConfig::new(Recipe::Rowwise))
        .with_override(["blocks.0.q"], Float8LinearConfig::new(Recipe::Blockwise));
    let text =
        "Applied Float8: recipe=tensorwise, 8 of 8 linears; overridden: blocks.0.q (blockwise), blocks.0.k (rowwise), ";
    let summary = summary(&config, 1).unwrap();
    assert!(summary.to_string().starts_with(text), "{summary}");
    assert_eq!(summary.overridden.len(), 7);
}
