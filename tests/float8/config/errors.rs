//! Bad configurations give typed errors that name the values. Bad shapes panic as in Burn's own
//! linear.
use burn::nn::LayerNormConfig;
use burn::tensor::backend::Backend;
use burn::tensor::{Tensor, module::linear};
use burn_float8::config::{CastConfig, Casts, Format, Granularity, Operand, ScaleCalculationMode, ScalingType};
use burn_float8::lora::LoraConfig;
use burn_float8::{
    Float8, Float8Config, Float8Error, Float8LinearConfig, PrecisionSchedule, Recipe, Span, report::Gemm,
    set_default_config,
};
use device_select::{DeviceChoice, DeviceError, SelectedDevice, cuda_setup, select};
use test_data::panic_of;

use crate::support::model::Model;
use crate::support::runtime::Flex;

type B = Float8<Flex>;

/// Text of the error of applying a configuration to a model of three blocks, which must begin so.
fn refused(config: &Float8Config, text: &str) {
    let error = Float8Error::from(config.apply(Model::<B>::new(3)).map(|_| ()).unwrap_err()).to_string();
    assert!(error.starts_with(text), "{error:?}, not {text:?}");
}

#[test]
fn configurations_that_do_not_fit_the_model() {
    let filtered = |patterns: &[&str]| Float8Config::tensorwise().with_filter_fqns(patterns.iter().copied());
    let high = |first, last| Float8Config::tensorwise().with_layers_in_high_precision(first, last);
    let rowwise = || Float8LinearConfig::new(Recipe::Rowwise);
    let types = |name: &str| Float8Config::tensorwise().with_module_types([name]);
    for (config, text) in [
        (filtered(&["head", "output"]), "filter_fqns: \"output\" matches none of these 22 linears: blocks.0.q, "),
        (filtered(&["blocks.*.missing"]), "filter_fqns: \"blocks.*.missing\" matches none of these 22 linears: "),
        (filtered(&["blocks.[0"]), "filter_fqns = \"blocks.[0\": not a valid glob: "),
        (filtered(&["*"]), "all 22 linears are kept in high precision (filter \"*\"): nothing is left to run in FP8"),
        (
            filtered(&["head"]).with_layers_in_high_precision(2, 1),
            "all 22 linears are kept in high precision (filter \"head\", first and last layers): nothing is left to run in FP8",
        ),
        (
            high(2, 2),
            "num_layers_at_start_in_high_precision + num_layers_at_end_in_high_precision = 2 + 2: the names of the \
             model's linears count 3 layers",
        ),
        (
            Float8Config::tensorwise().with_override(["blocks.9"], rowwise()),
            "overrides.fqns: \"blocks.9\" matches none of these 22 linears: ",
        ),
        (Float8Config::tensorwise().with_override([""; 0], rowwise()), "overrides.fqns = []: "),
        (types("Gats"), "module_types = \"Gats\": the model has no parameter of rank 2 that it names"),
    ] {
        refused(&config, text);
    }
    let norm = LayerNormConfig::new(4).init::<B>(&Default::default());
    let error = Float8Config::tensorwise().apply(norm).map(|_| ()).unwrap_err().error;
    assert_eq!(error, Float8Error::NothingConverted { linears: 0, reasons: String::new() });
    assert!(error.to_string().starts_with("the model has no linear layer"), "{error}");
}

/// Rules between settings are checked in the same way by `validate`, by `apply`, for a device's
/// default and in files.
#[test]
fn settings_that_contradict_each_other() {
    let rowwise = Recipe::Rowwise.casts();
    let with = |casts| Float8LinearConfig::new(Recipe::Rowwise).with_casts(casts);
    let (off, e5m2) = (CastConfig::disabled(), CastConfig::dynamic(Granularity::Row, Format::E5m2));
    let delayed = CastConfig { scaling_type: ScalingType::Delayed, ..rowwise[Operand::INPUT] };
    let mode = |recipe, mode| Float8LinearConfig::new(recipe).with_scale_calculation_mode(mode);
    let history = |amax_history_len, margin| {
        let linear = Float8LinearConfig::new(Recipe::Delayed);
        let delayed = linear.delayed_scaling();
        linear.with_delayed_scaling(burn_float8::config::DelayedScaling { amax_history_len, margin, ..delayed })
    };
    let floor = ScaleCalculationMode::Floor;
    for (config, needles) in [
        (
            with(rowwise.with(Operand::INPUT, off)),
            ["fprop", "cast_config_input is disabled and cast_config_weight is not"],
        ),
        (
            with(rowwise.with(Operand::WEIGHT_T, off)),
            ["fprop", "cast_config_weight is disabled and cast_config_input is not"],
        ),
        (with(rowwise.with(Operand::GRAD_OUTPUT, off)), ["dgrad", "cast_config_weight_for_grad_input is not"]),
        (with(rowwise.with(Operand::INPUT_T, off)), ["wgrad", "cast_config_grad_output_for_grad_weight is not"]),
        (with(rowwise.with(Operand::WEIGHT_T, e5m2)), ["weight must have one target_dtype", "not e5m2 and e4m3"]),
        (with(rowwise.with(Operand::GRAD_OUTPUT_T, e5m2)), ["grad_output must have", "not e4m3 and e5m2"]),
        (
            with(rowwise.with(Operand::INPUT, delayed)),
            ["cast_config_input", "delayed scaling is tensorwise, not rowwise"],
        ),
        (with(Casts::new(off, off, off)), ["all six casts", "disabled"]),
        (mode(Recipe::Rowwise, floor), ["scale_calculation_mode = floor with recipe rowwise", "no cast is of 1x32"]),
        // Replacing the casts that use it is an error too.
        (
            mode(Recipe::Mxfp8, floor).with_casts(rowwise),
            ["scale_calculation_mode = floor with recipe mxfp8", "no cast is of 1x32"],
        ),
        (
            Float8LinearConfig::new(Recipe::Rowwise).with_mx_square_weights(true),
            ["mx_square_weights = true with recipe rowwise", "no weight is cast by 1x32"],
        ),
        (history(0, 0), ["amax_history_len = 0", "must be 1 to 65536"]),
        (history(4, 9), ["delayed_scaling.margin = 9", "must be -8 to 8"]),
    ] {
        let error = config.validate().unwrap_err();
        let text = error.to_string();
        assert!(needles.iter().all(|needle| text.contains(needle)), "{text}");
        let config = Float8Config::from(config);
        refused(&config, &text);
        assert_eq!(set_default_config::<B>(&Default::default(), Some(&config)).unwrap_err(), error);
        let read = serde_json::from_str::<Float8Config>(&serde_json::to_string(&config).unwrap()).unwrap_err();
        assert!(read.to_string().contains(&text), "{read}");
    }
    // A dtype of a disabled cast does not count. One of the six casts is enough for a mode.
    with(rowwise.without(Gemm::Dgrad).with(Operand::GRAD_OUTPUT_T, e5m2)).validate().unwrap();
    let mx = CastConfig::dynamic(Granularity::Block1x32, Format::E4m3);
    with(rowwise.with(Operand::WEIGHT, mx)).with_scale_calculation_mode(floor).validate().unwrap();
    mode(Recipe::Mxfp8WgradWithHp, floor).with_mx_square_weights(true).validate().unwrap();
}

#[test]
fn files_that_are_wrong() {
    for (text, needles) in [
        (r#"{ "recipie": "rowwise" }"#, &["unknown field", "recipie"][..]),
        (r#"{ "recipe": "fp4" }"#, &["fp4", "rowwise_with_gw_hp"]),
        (r#"{ "cast_config_input": { "target_dtype": "e4m3" } }"#, &["scaling_granularity"]),
        (
            r#"{ "cast_config_input": { "scaling_granularity": "2x2", "target_dtype": "e4m3" } }"#,
            &["2x2", "128x128", "1x32"],
        ),
        (r#"{ "cast_config_input": { "scaling_granularity": "rowwise", "target_dtype": "e3m4" } }"#, &["e3m4", "e5m2"]),
        (r#"{ "scale_calculation_mode": "nearest" }"#, &["nearest", "floor", "ceil", "even", "rceil"]),
        (r#"{ "gemm_config_output": { "fast": true } }"#, &["fast", "use_fast_accum"]),
        (r#"{ "statistics": { "every_n_steps": 0 } }"#, &["every_n_steps"]),
        (r#"{ "fallback": { "min_sqnr_db": 20.0 } }"#, &["fallback needs statistics"]),
        (r#"{ "statistics": { "every_n_steps": 1 }, "fallback": {} }"#, &["no limit"]),
        (
            r#"{ "statistics": { "every_n_steps": 1 }, "fallback": { "max_flushed": 1.5 } }"#,
            &["fallback.max_flushed = 1.5", "from 0 to below 1"],
        ),
        (r#"{ "statistics": { "every_n_steps": 1, "compare": ["delayed"] } }"#, &["statistics.compare", "delayed"]),
        // The mode of overridden linears is set in their override.
        (
            r#"{ "scale_calculation_mode": "even", "overrides": [{ "fqns": ["*.q"], "config": { "recipe": "mxfp8" } }] }"#,
            &["scale_calculation_mode = even with recipe tensorwise", "an override has its own"],
        ),
        (
            r#"{ "recipe": "mxfp8",
                 "overrides": [{ "fqns": ["*.q"], "config": { "recipe": "rowwise", "scale_calculation_mode": "even" } }] }"#,
            &["scale_calculation_mode = even with recipe rowwise", "an override has its own"],
        ),
    ] {
        let error = serde_json::from_str::<Float8Config>(text).unwrap_err().to_string();
        assert!(needles.iter().all(|needle| error.contains(needle)), "{text}: {error}");
    }
    assert!(serde_json::from_str::<PrecisionSchedule>(r#"{"warmup": -0.5}"#).is_err());
    assert!(serde_json::from_str::<PrecisionSchedule>(r#"{"warm": 5}"#).is_err());
}

#[test]
fn values_that_are_wrong() {
    let schedule =
        |warmup, cooldown| PrecisionSchedule::new(Span::Fraction(warmup), Span::Fraction(cooldown)).map(|_| ());
    let targets = LoraConfig { target_modules: vec!["q".into(), "v_proj".into()], ..LoraConfig::default() };
    let delayed = Float8Config::new(Recipe::Delayed);
    for (result, text) in [
        (schedule(1.5, 0.0), "schedule.warmup = 1.5: must be a whole number of steps or a fraction from 0 to 1"),
        (
            schedule(0.75, 0.5),
            "schedule.warmup + schedule.cooldown = 1.25: must be at most 1: nothing is left to run in FP8",
        ),
        (
            "tensorwize".parse::<Recipe>().map(|_| ()),
            "recipe = \"tensorwize\": unknown recipe: expected one of tensorwise, rowwise",
        ),
        (targets.init(&Model::<B>::new(1), 1).map(|_| ()), "lora.target_modules: \"v_proj\" matches none of"),
        (
            set_default_config::<B>(&Default::default(), Some(&delayed)),
            "scaling_type = delayed: a history belongs to a layer",
        ),
    ] {
        let error = result.unwrap_err();
        assert!(matches!(error, Float8Error::Config { .. }) && error.to_string().starts_with(text), "{error}");
    }
}

#[test]
fn devices_that_are_absent_are_errors() {
    assert_eq!("tpu".parse::<DeviceChoice>(), Err(DeviceError::Unknown { name: "tpu".into() }));
    assert_eq!(select(DeviceChoice::Cpu), Ok(SelectedDevice::Cpu));
    assert!(select(DeviceChoice::Auto).is_ok());
    match (cuda_setup(), select(DeviceChoice::Cuda)) {
        (Ok(setup), selected) => assert!(setup.devices > 0 && selected == Ok(SelectedDevice::Cuda)),
        (Err(e), selected) => assert_eq!(selected, Err(e)),
    }
}

/// Message of the panic of a linear with mismatched shapes.
fn mismatch<B: Backend>(x: [usize; 2], w: [usize; 2], bias: Option<usize>) -> String {
    let device = Default::default();
    panic_of(|| {
        let bias = bias.map(|n| Tensor::<B, 1>::zeros([n], &device));
        linear(Tensor::<B, 2>::zeros(x, &device), Tensor::<B, 2>::zeros(w, &device), bias).into_data();
    })
}

#[test]
fn mismatched_shapes_panic_as_burns_own_linear() {
    for (x, w, bias) in [([2, 3], [4, 5], None), ([2, 4], [4, 5], Some(3))] {
        assert_eq!(mismatch::<B>(x, w, bias), mismatch::<Flex>(x, w, bias), "x {x:?} w {w:?} bias {bias:?}");
    }
}
