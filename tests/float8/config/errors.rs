//! Bad configurations give typed errors that name the values. Bad shapes panic as in Burn's own
//! linear.
use std::panic::{AssertUnwindSafe, catch_unwind};

use burn::module::Module;
use burn::nn::{LayerNorm, LayerNormConfig, LinearConfig};
use burn::tensor::backend::Backend;
use burn::tensor::{Tensor, module::linear};
use burn_float8::{Float8, Float8Config, Float8Error};
use device_select::{DeviceChoice, DeviceError, SelectedDevice, cuda_setup, select};

use crate::support::model::Model;
use crate::support::runtime::Flex;

type B = Float8<Flex>;

fn convert(config: Float8Config) -> Result<(), Float8Error> {
    Ok(config.apply(Model::<B>::new(1)).map(|_| ())?)
}

#[test]
fn a_filter_that_matches_nothing_is_an_error() {
    let error = convert(Float8Config::tensorwise().with_filter_fqns(["head", "output"])).unwrap_err();
    let Float8Error::Config { key: "filter_fqns", reason, .. } = &error else { panic!("{error}") };
    assert!(
        reason.starts_with("\"output\" matches none of these 8 linears: ") && reason.contains("blocks.0.q"),
        "{reason}"
    );
    let error = convert(Float8Config::tensorwise().with_filter_fqns(["blocks.*.missing"])).unwrap_err();
    assert!(error.to_string().starts_with("filter_fqns: \"blocks.*.missing\" matches none of"), "{error}");
}

#[test]
fn a_config_that_converts_nothing_is_an_error() {
    let error = convert(Float8Config::tensorwise().with_filter_fqns(["*"])).unwrap_err();
    assert_eq!(error, Float8Error::NothingConverted { linears: 8, reasons: "filter \"*\"".into() });
    let norm: LayerNorm<B> = LayerNormConfig::new(4).init(&Default::default());
    let error = Float8Config::tensorwise().apply(norm).map(|_| ()).unwrap_err().error;
    assert_eq!(error, Float8Error::NothingConverted { linears: 0, reasons: String::new() });
    assert!(error.to_string().contains("no linear layer"), "{error}");
}

#[test]
fn a_bad_glob_is_an_error() {
    let error = convert(Float8Config::tensorwise().with_filter_fqns(["blocks.[0"])).unwrap_err();
    assert!(error.to_string().starts_with("filter_fqns = \"blocks.[0\": not a valid glob: "), "{error}");
}

#[test]
fn filters_match_substrings_and_globs() {
    for (filter, skipped) in [("head", 1), ("blocks.0", 7), ("blocks.*.q", 1), ("*.[qkv]", 3)] {
        let config = Float8Config::tensorwise().with_filter_fqns([filter]);
        match config.apply(Model::<B>::new(1)) {
            Ok((_, summary)) => assert_eq!(summary.skipped.len(), skipped, "{filter}: {summary}"),
            Err(e) => panic!("{filter}: {e}"),
        }
    }
}

#[test]
fn unknown_keys_of_a_config_are_errors() {
    let parse = |text: &str| serde_json::from_str::<Float8Config>(text);
    assert_eq!(parse(r#"{"recipe": "tensorwise"}"#).unwrap(), Float8Config::tensorwise());
    assert!(parse(r#"{"recipie": "tensorwise"}"#).unwrap_err().to_string().contains("recipie"));
    assert!(parse(r#"{"recipe": "fp4"}"#).unwrap_err().to_string().contains("fp4"));
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
fn panic_of<B: Backend>(x: [usize; 2], w: [usize; 2], bias: Option<usize>) -> String {
    let device = Default::default();
    let run = || {
        let bias = bias.map(|n| Tensor::<B, 1>::zeros([n], &device));
        linear(Tensor::<B, 2>::zeros(x, &device), Tensor::<B, 2>::zeros(w, &device), bias).into_data()
    };
    let payload = catch_unwind(AssertUnwindSafe(run)).expect_err("the shapes do not fit");
    let text = payload.downcast_ref::<String>().cloned();
    text.unwrap_or_else(|| payload.downcast_ref::<&str>().expect("a message").to_string())
}

#[test]
fn mismatched_shapes_panic_as_burns_own_linear() {
    for (x, w, bias) in [([2, 3], [4, 5], None), ([2, 4], [4, 5], Some(3))] {
        assert_eq!(panic_of::<B>(x, w, bias), panic_of::<Flex>(x, w, bias), "x {x:?} w {w:?} bias {bias:?}");
    }
}

#[test]
fn a_bare_linear_has_a_name() {
    let linear = LinearConfig::new(4, 4).init::<B>(&Default::default());
    assert_eq!(linear.num_params(), 20);
    let (_, summary) = Float8Config::tensorwise().apply(linear).unwrap();
    assert_eq!(summary.to_string(), "Applied Float8: recipe=tensorwise, 1 of 1 linears");
}
