//! Burn's quantization of a model's weights: such parameters are not FP8 linears and cause no
//! panic.
use burn::backend::Flex;
use burn::module::{AutodiffModule, Module, Quantizer};
use burn::tensor::backend::Backend;
use burn::tensor::ops::QuantizedTensor;
use burn::tensor::quantization::{Calibration, QTensorPrimitive, QuantLevel, QuantParam, QuantValue};
use burn_float8::{Float8Config, Float8Error, Float8State, Recipe, begin_float8_step, report, set_float8_enabled};

use crate::programs::support::models::Mlp;
use crate::programs::support::{B, F8, applied, bits, float8_calls, layer_of, own_report, with_parameters, x};

/// Quantizes to Q8S, with one scale for a tensor.
pub fn quantizer<A: Backend>() -> Quantizer {
    let scheme = <QuantizedTensor<A> as QTensorPrimitive>::default_scheme()
        .with_value(QuantValue::Q8S)
        .with_level(QuantLevel::Tensor)
        .with_param(QuantParam::F32);
    Quantizer { calibration: Calibration::MinMax, scheme }
}

/// Quantization drops the tags, so nothing runs in FP8, including filtered layers.
#[test]
fn excluded_layers_stay_excluded() {
    let config = Float8Config::tensorwise().with_filter_fqns(["second"]);
    let model: Mlp<B> = applied(&config, Mlp::new());
    let y = model.valid().quantize_weights(&mut quantizer::<F8>()).forward(x(1));
    let plain: Mlp<Flex> = with_parameters(Mlp::new(), 1);
    assert_eq!(bits(y), bits(plain.quantize_weights(&mut quantizer::<Flex>()).forward(x(1))));
    assert_eq!(float8_calls(&layer_of(&model, "second")), [0; 3]);
}

/// Functions that visit a model skip such parameters.
fn walks_past<A: burn_float8::Float8Stack>(quantized: Mlp<A>) {
    assert!(own_report(&quantized).layers.is_empty(), "no layer of FP8");
    let _ = report(&quantized).verify();
    set_float8_enabled(&quantized, false);
    set_float8_enabled(&quantized, true);
    begin_float8_step(&quantized);
    assert!(Float8State::export(&quantized).layers.is_empty());
    Float8State::default().restore(&quantized).unwrap();
    // Nothing is left to convert, and the error returns the model.
    let error = Float8Config::tensorwise().apply(quantized).unwrap_err();
    assert!(matches!(error.error, Float8Error::NothingConverted { .. }), "{error}");
    assert!(own_report::<A, _>(&*error.model).layers.is_empty());
}

#[test]
fn with_and_without_autodiff() {
    let model: Mlp<F8> = applied(&Float8Config::tensorwise(), Mlp::new());
    let quantized = || model.clone().no_grad().quantize_weights(&mut quantizer::<F8>());
    walks_past(quantized());
    walks_past(Mlp::<B>::from_inner(quantized()));
}

/// A model with one quantized and one float linear.
#[test]
fn the_summary_lists_them_as_skipped() {
    for recipe in [Recipe::Tensorwise, Recipe::Delayed] {
        let model: Mlp<F8> = with_parameters(Mlp::new(), 1);
        let first = model.first.clone().quantize_weights(&mut quantizer::<F8>());
        let weight = bits(first.weight.val().dequantize());
        let (model, summary) = Float8Config::new(recipe).apply(Mlp { first, ..model }).unwrap();
        assert_eq!(summary.converted, ["second"]);
        assert_eq!(summary.skipped, [("first".to_string(), "quantized".to_string())]);
        assert!(summary.to_string().contains("1 of 2 linears"), "{summary}");
        model.forward(x(1));
        let report = own_report(&model);
        let found: Vec<_> = report.layers.iter().map(|l| (l.name.as_str(), float8_calls(l))).collect();
        assert_eq!(found, [("second", [1, 0, 0])]);
        assert_eq!(bits(model.first.weight.val().dequantize()), weight, "it stays as it was");
    }
}
