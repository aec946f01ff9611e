//! Weights that forward computes and penalties that read them, in strict mode: no panic, no extra
//! step, exact gradients.
use burn::module::Module;
use burn::nn::Linear;
use burn::tensor::{Tensor, module::linear};
use burn_float8::{Float8Config, Float8LinearConfig, Float8State, Recipe};

use crate::support::models::{Attention, D, Mlp};
use crate::support::{B, F8, applied, assert_falls, counters, float8_calls, layer, own_report, tensor, train, values};

const STEPS: u64 = 5;

fn configs() -> [Float8Config; 3] {
    let matmul = Float8LinearConfig::new(Recipe::Tensorwise).with_matmul(true);
    [Float8Config::tensorwise(), Float8Config::new(Recipe::Delayed), Float8Config::from(matmul)]
        .map(|config| config.with_strict(true))
}

fn x() -> Tensor<B, 2> {
    tensor([6, D], 1)
}

fn to_target(y: Tensor<B, 2>) -> Tensor<B, 1> {
    let target = tensor::<B, 2>(y.dims(), 2).tanh();
    (y - target).powf_scalar(2.0).mean()
}

fn assert_runs_in_float8(model: &Mlp<B>, what: &str) {
    let report = own_report(model);
    for l in &report.layers {
        assert!(float8_calls(l)[0] >= STEPS && float8_calls(l)[2] >= STEPS, "{what} {}: {report}", l.name);
        assert_eq!(l.totals().high_precision, 0, "{what} {}", l.name);
    }
    assert_eq!(Float8State::export(model).step, STEPS, "{what}");
}

/// `‖wᵀ·w − 1‖²`
#[test]
fn orthogonality_penalty() {
    for config in configs() {
        let model: Mlp<B> = applied(&config, Mlp::new());
        let penalty = |l: &Linear<B>| {
            let w = l.weight.val();
            let n = w.dims()[1];
            let gram = w.clone().transpose().matmul(w);
            (gram - Tensor::eye(n, &Default::default())).powf_scalar(2.0).mean()
        };
        let (model, losses) =
            train(model, 0..STEPS, |m, _| to_target(m.forward(x())) + (penalty(&m.first) + penalty(&m.second)) * 0.1);
        assert!(losses[4] < losses[0], "{losses:?}");
        assert_runs_in_float8(&model, &format!("{config:?}"));
    }
}

/// One power iteration; the linear then runs with `w / σ`.
#[test]
fn spectral_norm() {
    for config in configs() {
        let model: Mlp<B> = applied(&config, Mlp::new());
        let normalized = |l: &Linear<B>, x: Tensor<B, 2>| {
            let w = l.weight.val();
            let unit = |v: Tensor<B, 2>| v.clone() / v.powf_scalar(2.0).sum().sqrt().unsqueeze();
            let u = unit(tensor([1, w.dims()[0]], 3));
            let v = unit(u.clone().matmul(w.clone()).detach());
            let u = unit(v.clone().matmul(w.clone().transpose()).detach());
            let sigma = u.matmul(w.clone()).matmul(v.transpose());
            linear(x, w / sigma, l.bias.as_ref().map(|bias| bias.val()))
        };
        let (model, losses) = train(model, 0..STEPS, |m, _| {
            let h = burn::tensor::activation::relu(normalized(&m.first, x()));
            to_target(normalized(&m.second, h))
        });
        assert!(losses[4] < losses[0], "{losses:?}");
        assert_runs_in_float8(&model, &format!("{config:?}"));
    }
}

/// Weight norm: separate direction and length, combined in forward.
#[test]
fn weights_computed_in_forward_begin_one_step_each() {
    for recipe in [Recipe::Tensorwise, Recipe::Delayed] {
        let model: Attention<B> = applied(&Float8Config::new(recipe).with_strict(true), Attention::new());
        let normed = |l: &Linear<B>| {
            let w = l.weight.val();
            let norm = w.clone().powf_scalar(2.0).sum_dim(0).sqrt();
            w / norm
        };
        let (model, losses) = train(model, 0..STEPS, |m, _| {
            // Three linears on one x, for each of two micro-batches.
            let run = |seed| {
                let x = tensor::<B, 2>([6, D], seed);
                let y = [&m.q, &m.k, &m.v].map(|l| linear(x.clone(), normed(l), None));
                to_target(y.into_iter().reduce(|a, b| a + b).expect("three"))
            };
            run(1) + run(2)
        });
        assert!(losses[4] < losses[0], "{losses:?}");
        let state = Float8State::export(&model);
        assert_eq!(state.step, STEPS, "{recipe}");
        let report = own_report(&model);
        for name in ["q", "k", "v"] {
            assert_eq!(float8_calls(layer(&report, name)), [2 * STEPS, 0, 2 * STEPS], "{recipe} {name}");
            assert_eq!(layer(&report, name).totals().high_precision, 0, "{recipe} {name}");
        }
        // x is cast once for all three linears, in each micro-batch.
        let casts: u64 = ["q", "k", "v"].iter().map(|name| layer(&report, name).casts[0]).sum();
        assert_eq!(casts, 2 * STEPS, "{recipe}: shared x");
    }
}

/// A penalty's gradient is added to the linear's, and gradients do not count as weights.
#[test]
fn l2_penalty() {
    const PENALTY: f32 = 0.5;
    for config in configs() {
        let model: Mlp<B> = applied(&config, Mlp::new());
        let w = model.first.weight.val();
        let dw = |with: bool| {
            let loss = to_target(model.forward(x()));
            let penalty = w.clone().powf_scalar(2.0).sum() * PENALTY;
            let loss = if with { loss + penalty } else { loss };
            w.grad(&loss.backward()).expect("tracked")
        };
        let (with, without) = (dw(true), dw(false));
        let expected = values(without + w.clone().inner() * (2.0 * PENALTY));
        for (ours, expected) in values(with.clone()).into_iter().zip(expected) {
            assert!((ours - expected).abs() <= 1e-6 * (1.0 + expected.abs()), "{ours} {expected}");
        }
        // A gradient is not a weight of the layer, so its products are not the layer's.
        let before = counters(&model);
        let gram: Tensor<F8, 2> = with.clone().transpose().matmul(with.clone());
        linear(gram, with.transpose(), None);
        assert_eq!(counters(&model), before);
    }
}

#[test]
fn l2_penalty_in_training() {
    for config in configs() {
        let model: Mlp<B> = applied(&config, Mlp::new());
        let (model, losses) = train(model, 0..2 * STEPS, |m, _| {
            let penalty = |l: &Linear<B>| l.weight.val().powf_scalar(2.0).sum();
            to_target(m.forward(x())) + (penalty(&m.first) + penalty(&m.second)) * 1e-2
        });
        assert_falls(&losses);
        let report = own_report(&model);
        report.verify().unwrap();
        for l in &report.layers {
            assert_eq!([float8_calls(l)[0], float8_calls(l)[2]], [2 * STEPS; 2], "{}", l.name);
        }
        assert_eq!(Float8State::export(&model).step, 2 * STEPS);
    }
}

/// Adding a frozen copy's weight does not begin a new step.
#[test]
fn interpolated_weights() {
    let model: Mlp<B> = applied(&Float8Config::new(Recipe::Delayed), Mlp::new());
    let anchor = model.clone().no_grad();
    let (model, _) = train(model, 0..STEPS, |m, _| {
        let w = m.first.weight.val() * 0.9 + anchor.first.weight.val() * 0.1;
        let h = linear(x(), w, m.first.bias.as_ref().map(|b| b.val()));
        to_target(m.second.forward(burn::tensor::activation::relu(h)))
    });
    assert_eq!(Float8State::export(&model).step, STEPS);
    assert_eq!(float8_calls(layer(&own_report(&model), "first")), [STEPS, 0, STEPS]);
}

/// `xᵀ·y` in forward has the shapes of a weight gradient but is not one.
#[test]
fn products_of_inputs_and_outputs() {
    for config in configs() {
        let model: Mlp<B> = applied(&config, Mlp::new());
        let (model, losses) = train(model, 0..STEPS, |m, step| {
            let y = m.first.forward(x());
            let before = float8_calls(layer(&own_report(m), "first"));
            let correlation = x().transpose().matmul(y.clone());
            // Also by `matmul` with the weight, as GRU reads it.
            let shared = x();
            let z = shared.clone().matmul(m.first.weight.val());
            let gram = shared.transpose().matmul(z.clone());
            let after = float8_calls(layer(&own_report(m), "first"));
            assert_eq!([after[1], after[2]], [before[1], before[2]], "no backward has come");
            assert_eq!(Float8State::export(m).step, step + 1);
            to_target(m.second.forward(burn::tensor::activation::relu(y + z)))
                + (correlation.powf_scalar(2.0).mean() + gram.powf_scalar(2.0).mean()) * 1e-3
        });
        assert!(losses[4] < losses[0], "{losses:?}");
        assert_eq!(Float8State::export(&model).step, STEPS);
    }
}
