//! burn-nn's modules: `apply` finds their linears, a training step runs all three GEMMs of each in
//! FP8, and losses fall.
use std::sync::{Arc, Mutex};

use burn::module::{Module, Param, ParamId};
use burn::nn::conv::{Conv2d, Conv2dConfig};
use burn::nn::pool::{AdaptiveAvgPool2d, AdaptiveAvgPool2dConfig};
use burn::nn::transformer::{TransformerDecoderConfig, TransformerDecoderInput};
use burn::nn::{Linear, LinearConfig, PaddingConfig2d};
use burn::tensor::backend::Backend;
use burn::tensor::{Tensor, activation};
use burn_float8::Float8Config;

use crate::programs::support::{B, applied, assert_all_in_float8, assert_falls, tensor, train};

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

#[derive(Module, Debug)]
struct ConvNet<B: Backend> {
    conv: Conv2d<B>,
    pool: AdaptiveAvgPool2d,
    head: Linear<B>,
}

#[test]
fn convolutions_with_a_linear_head() {
    let device = Default::default();
    let model = ConvNet {
        conv: Conv2dConfig::new([1, 4], [3, 3]).with_padding(PaddingConfig2d::Same).init(&device),
        pool: AdaptiveAvgPool2dConfig::new([2, 2]).init(),
        head: LinearConfig::new(16, 4).init(&device),
    };
    let model: ConvNet<B> = applied(&Float8Config::tensorwise().with_strict(true), model);
    let kernel = model.conv.weight.val();
    let (model, losses) = train(model, 0..STEPS, |m, _| {
        let images = tensor::<B, 4>([BATCH, 1, 6, 6], 94);
        let features = m.pool.forward(activation::relu(m.conv.forward(images)));
        to_target(m.head.forward(features.flatten::<2>(1, 3)))
    });
    assert_all_in_float8(&model, &["head"], STEPS);
    assert_falls(&losses);
    let moved = (model.conv.weight.val() - kernel).abs().max().into_scalar();
    assert!(moved > 1e-3, "the convolution learns too: {moved}");
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
