//! GRU uses `Tensor::matmul`: the report counts it, and the option `matmul` runs it in FP8 like a
//! linear.
use burn::nn::{Gru, GruConfig, Linear, LinearConfig};
use burn::tensor::Tensor;
use burn_float8::{Float8Config, Float8LinearConfig, Recipe};

use crate::programs::support::{B, applied, assert_falls, bits, float8_calls, layer_of, own_report, tensor, train};

const D: usize = 16;
const H: usize = 8;
const TOKENS: usize = 3;
const STEPS: u64 = 6;

fn gru(config: &Float8Config) -> Gru<B> {
    applied(config, GruConfig::new(D, H, true).with_reset_after(false).init::<B>(&Default::default()))
}

fn with_matmul(recipe: Recipe) -> Float8Config {
    Float8Config::from(Float8LinearConfig::new(recipe).with_matmul(true))
}

fn x() -> Tensor<B, 3> {
    tensor::<B, 3>([2, TOKENS, D], 80).require_grad()
}

fn loss(y: Tensor<B, 3>) -> Tensor<B, 1> {
    let target = tensor::<B, 3>(y.dims(), 81).tanh() * 0.5;
    (y - target).powf_scalar(2.0).mean()
}

/// Whether the layer's input needs a gradient in the first time step too.
fn needs_every_dgrad(name: &str) -> bool {
    name.ends_with("input_transform") || name == "new_gate.hidden_transform"
}

#[test]
fn with_the_option_all_three_gemms_run_in_float8() {
    for recipe in [Recipe::Tensorwise, Recipe::Rowwise, Recipe::Delayed] {
        let config = with_matmul(recipe).with_strict(true);
        let (model, losses) = train(gru(&config), 0..STEPS, |m, _| loss(m.forward(x(), None)));
        assert_falls(&losses);
        let report = own_report(&model);
        let calls = STEPS * TOKENS as u64;
        for l in &report.layers {
            let dgrads = if needs_every_dgrad(&l.name) { calls } else { calls - STEPS };
            let ran = [l.fprop.emulated, l.dgrad.emulated, l.wgrad.emulated];
            assert_eq!(ran, [calls, dgrads, calls], "{recipe} {}\n{report}", l.name);
            assert_eq!(l.totals().high_precision, 0, "{recipe} {}", l.name);
            assert_eq!(l.weight_matmuls, 0, "{recipe} {}: none of them is a read beside FP8", l.name);
        }
        report.verify().unwrap();
    }
}

/// A penalty also saves the weight, but the backward of its matmul is still a dgrad with one
/// dgrad's casts.
#[test]
fn a_penalty_on_the_weight_changes_no_gradient_of_the_matmul() {
    for recipe in [Recipe::Tensorwise, Recipe::Delayed] {
        let run = |penalty: Option<bool>| {
            let l: Linear<B> =
                applied(&with_matmul(recipe).with_strict(true), LinearConfig::new(D, D).init(&Default::default()));
            let mut dx = vec![];
            for step in 0..3 {
                let x = tensor::<B, 2>([6, D], step).require_grad();
                let square = || l.weight.val().powf_scalar(2.0).sum() * 1e-9;
                let before = penalty.filter(|is_before| *is_before).map(|_| square());
                let mut loss = x.clone().matmul(l.weight.val()).powf_scalar(2.0).sum() * 1e3;
                if penalty.is_some() {
                    loss = loss + before.unwrap_or_else(square);
                }
                dx.push(bits(x.grad(&loss.backward()).unwrap()));
            }
            let layer = layer_of(&l, "linear");
            assert_eq!((float8_calls(&layer), layer.weight_matmuls), ([3; 3], 0), "{recipe} {penalty:?}");
            dx
        };
        let expected = run(None);
        assert_eq!(run(Some(true)), expected, "{recipe}");
        assert_eq!(run(Some(false)), expected, "{recipe}");
    }
    // Other forwards whose graphs are dropped first.
    let l: Linear<B> = applied(&with_matmul(Recipe::Tensorwise), LinearConfig::new(D, D).init(&Default::default()));
    let forward = |seed| tensor::<B, 2>([6, D], seed).require_grad().matmul(l.weight.val()).sum();
    let y = forward(1);
    (0..100).for_each(|seed| drop(forward(seed)));
    y.backward();
    assert_eq!(float8_calls(&layer_of(&l, "linear")), [101, 1, 1]);
}
