//! Weights that forward computes and penalties that read them, in strict mode: no panic and no
//! extra step.
use burn::module::Module;
use burn::nn::Linear;
use burn::tensor::{Tensor, activation::relu, module::linear};
use burn_float8::{Float8Config, Float8LinearConfig, Float8State, Recipe};

use crate::programs::support::models::{Block, Mlp};
use crate::programs::support::{
    B, applied, calls, float8_calls, layer, layer_of, mean_square, own_report, tensor, to_target, train, x,
};

const STEPS: u64 = 5;

/// `‖wᵀ·w − 1‖²`, a product of two weights, as a regularizer of LoRA reads it, and a decoder that
/// is the encoder's transposed weight.
fn orthogonality_penalty(m: &Mlp<B>) -> Tensor<B, 1> {
    let penalty = |l: &Linear<B>| {
        let w = l.weight.val();
        let n = w.dims()[1];
        mean_square(w.clone().transpose().matmul(w) - Tensor::<B, 2>::eye(n, &Default::default()))
    };
    let product = mean_square(m.first.weight.val().matmul(m.second.weight.val()));
    let decoded = m.first.forward(x(1)).tanh().matmul(m.first.weight.val().transpose());
    let penalties = penalty(&m.first) + penalty(&m.second) + product + mean_square(decoded - x(1));
    to_target(m.forward(x(1))) + penalties * 0.1
}

/// One power iteration; the linear then runs with `w / σ`.
fn spectral_norm(m: &Mlp<B>) -> Tensor<B, 1> {
    let normalized = |l: &Linear<B>, x: Tensor<B, 2>| {
        let w = l.weight.val();
        let unit = |v: Tensor<B, 2>| v.clone() / v.powf_scalar(2.0).sum().sqrt().unsqueeze();
        let u = unit(tensor([1, w.dims()[0]], 3));
        let v = unit(u.clone().matmul(w.clone()).detach());
        let u = unit(v.clone().matmul(w.clone().transpose()).detach());
        let sigma = u.matmul(w.clone()).matmul(v.transpose());
        linear(x, w / sigma, l.bias.as_ref().map(|bias| bias.val()))
    };
    to_target(normalized(&m.second, relu(normalized(&m.first, x(1)))))
}

#[test]
fn penalties_and_norms_of_weights() {
    let matmul = Float8LinearConfig::new(Recipe::Tensorwise).with_matmul(true);
    let configs = [Float8Config::tensorwise(), Float8Config::new(Recipe::Delayed), Float8Config::from(matmul)];
    let losses = [orthogonality_penalty as fn(&Mlp<B>) -> _, spectral_norm];
    for (config, loss) in configs.into_iter().flat_map(|config| losses.map(|loss| (config.clone(), loss))) {
        let config = config.with_strict(true);
        let (model, losses) = train(applied(&config, Mlp::new()), 0..STEPS, |m, _| loss(m));
        assert!(losses[4] < losses[0], "{losses:?}");
        let report = own_report(&model);
        for l in &report.layers {
            assert!(float8_calls(l)[0] >= STEPS && float8_calls(l)[2] >= STEPS, "{config:?} {}: {report}", l.name);
            assert_eq!(l.totals().high_precision, 0, "{config:?} {}", l.name);
        }
        assert_eq!(Float8State::export(&model).step, STEPS, "{config:?}");
    }
}

/// Weight norm: separate direction and length, combined in forward.
#[test]
fn weights_computed_in_forward_begin_one_step_each() {
    for recipe in [Recipe::Tensorwise, Recipe::Delayed] {
        let model: Block<B> = applied(&Float8Config::new(recipe).with_strict(true), Block::new());
        let normed = |l: &Linear<B>| {
            let w = l.weight.val();
            let norm = w.clone().powf_scalar(2.0).sum_dim(0).sqrt();
            w / norm
        };
        let (model, losses) = train(model, 0..STEPS, |m, _| {
            // Three linears on one x, for each of two micro-batches.
            let run = |seed| {
                let x = x::<B>(seed);
                let y = [&m.q, &m.k, &m.v].map(|l| linear(x.clone(), normed(l), None));
                to_target(y.into_iter().reduce(|a, b| a + b).expect("three"))
            };
            run(1) + run(2)
        });
        assert!(losses[4] < losses[0], "{losses:?}");
        assert_eq!(Float8State::export(&model).step, STEPS, "{recipe}");
        let report = own_report(&model);
        for name in ["q", "k", "v"] {
            assert_eq!(calls(layer(&report, name)), [[2 * STEPS, 0, 2 * STEPS], [0; 3]], "{recipe} {name}");
        }
        // x is cast once for all three linears, in each micro-batch.
        let casts: u64 = ["q", "k", "v"].iter().map(|name| layer(&report, name).casts[0]).sum();
        assert_eq!(casts, 2 * STEPS, "{recipe}: shared x");
    }
}

/// Adding a frozen copy's weight, as a merged LoRA does, does not begin a new step. The computed
/// weight is cast once a step and has a history.
#[test]
fn interpolated_weights() {
    let model: Mlp<B> = applied(&Float8Config::new(Recipe::Delayed), Mlp::new());
    let anchor = model.clone().no_grad();
    let (model, _) = train(model, 0..STEPS, |m, _| {
        let w = m.first.weight.val() * 0.9 + anchor.first.weight.val() * 0.1;
        let h = linear(x(1), w, m.first.bias.as_ref().map(|b| b.val()));
        to_target(m.second.forward(relu(h)))
    });
    let state = Float8State::export(&model);
    assert_eq!(state.step, STEPS);
    let history = &state.layers["first"].weight.as_ref().expect("delayed").history;
    assert_eq!(history.iter().filter(|amax| **amax > 0).count() as u64, STEPS - 1, "the last step is not over");
    let first = layer_of(&model, "first");
    assert_eq!((float8_calls(&first), first.casts[1]), ([STEPS, 0, STEPS], STEPS));
}
