//! burn-nn's modules: `apply` finds their linears, a training step runs all three GEMMs of each in
//! FP8, and losses fall.
use std::sync::{Arc, Mutex};

use burn::module::{Param, ParamId};
use burn::nn::transformer::{TransformerDecoderConfig, TransformerDecoderInput};
use burn::nn::{GruConfig, Linear};
use burn::tensor::Tensor;
use burn_float8::{Float8Config, Float8LinearConfig, Recipe};

use crate::programs::support::{
    B, applied, assert_all_in_float8, assert_falls, float8_calls, own_report, tensor, train,
};

const STEPS: u64 = 8;
const BATCH: usize = 3;
const TOKENS: usize = 4;
const D: usize = 16;

/// Tracked, so that the first linears have a dgrad too.
fn x() -> Tensor<B, 3> {
    tensor::<B, 3>([BATCH, TOKENS, D], 90).require_grad()
}

/// Mean squared error to a fixed target.
fn to_target<const R: usize>(y: Tensor<B, R>) -> Tensor<B, 1> {
    let target = tensor::<B, R>(y.dims(), 91).tanh();
    (y - target).powf_scalar(2.0).mean()
}

#[test]
fn transformer_decoder() {
    let model = TransformerDecoderConfig::new(D, 2 * D, 2, 1).with_dropout(0.0).init::<B>(&Default::default());
    let model = applied(&Float8Config::tensorwise(), model);
    let memory = || tensor::<B, 3>([BATCH, 5, D], 92).require_grad();
    let (model, losses) =
        train(model, 0..STEPS, |m, _| to_target(m.forward(TransformerDecoderInput::new(x(), memory()))));
    let attention = |name: &str| ["query", "key", "value", "output"].map(|part| format!("layers.0.{name}.{part}"));
    let ffn = ["linear_inner", "linear_outer"].map(|part| format!("layers.0.pwff.{part}"));
    let names: Vec<_> = attention("cross_attn").into_iter().chain(attention("self_attn")).chain(ffn).collect();
    assert_all_in_float8(&model, &names.iter().map(String::as_str).collect::<Vec<_>>(), STEPS);
    assert_falls(&losses);
}

/// GRU multiplies by `Tensor::matmul`, which the option runs like a linear.
#[test]
fn gru() {
    let config = Float8Config::from(Float8LinearConfig::new(Recipe::Tensorwise).with_matmul(true)).with_strict(true);
    let model = GruConfig::new(D, 8, true).with_reset_after(false).init::<B>(&Default::default());
    let (model, losses) = train(applied(&config, model), 0..STEPS, |m, _| to_target(m.forward(x(), None)));
    assert_falls(&losses);
    let report = own_report(&model);
    assert_eq!(report.layers.len(), 6);
    for l in &report.layers {
        assert_eq!([float8_calls(l)[0], float8_calls(l)[2]], [STEPS * TOKENS as u64; 2], "{}", l.name);
        assert_eq!((l.totals().high_precision, l.weight_matmuls), (0, 0), "{}", l.name);
    }
    report.verify().unwrap();
}

/// Linears with weights and biases: `apply` initializes parameters in the order of a plain module
/// visit.
#[test]
fn parameters_are_drawn_in_the_order_of_the_module() {
    fn drawn(apply: impl FnOnce(Vec<Linear<B>>)) -> Vec<usize> {
        let order: Arc<Mutex<Vec<usize>>> = Arc::default();
        let noted = |number: usize| {
            let order = order.clone();
            move || order.lock().unwrap().push(number)
        };
        let linear = |number: usize| {
            let (weight, bias) = (noted(2 * number), noted(2 * number + 1));
            let device = Default::default();
            let weight = move |device: &_, _| {
                weight();
                Tensor::ones([D, D], device).require_grad()
            };
            let bias = move |device: &_, _| {
                bias();
                Tensor::ones([D], device).require_grad()
            };
            Linear {
                weight: Param::uninitialized(ParamId::new(), weight, device, true, [D, D].into()),
                bias: Some(Param::uninitialized(ParamId::new(), bias, device, true, [D].into())),
            }
        };
        apply((0..3).map(linear).collect());
        let order = order.lock().unwrap();
        order.clone()
    }
    assert_eq!(drawn(|model| drop(Float8Config::tensorwise().apply(model).unwrap())), [0, 1, 2, 3, 4, 5]);
}
