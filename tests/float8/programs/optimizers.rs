//! Optimizers, with gradient clipping.
use burn::backend::Flex;
use burn::grad_clipping::GradientClippingConfig;
use burn::optim::momentum::MomentumConfig;
use burn::optim::{
    AdaGradConfig, AdamConfig, AdamWConfig, AdanConfig, GradientsParams, LBFGSConfig, LineSearchFn, MuonConfig,
    Optimizer, RmsPropConfig, SgdConfig,
};
use burn::tensor::Tensor;
use burn_float8::{Float8Config, Float8LinearConfig, Recipe};

use crate::programs::support::models::{Block, input};
use crate::programs::support::{
    B, Plain, applied, bits, calls, constant, dw, float8_calls, own_report, to_target, values, with_parameters,
};

fn loss(model: &Block<B>) -> Tensor<B, 1> {
    to_target(model.forward(input(1)))
}

/// Trains a converted model with one filtered layer, and checks that every linear keeps its
/// precision.
fn keeps_every_layer<O: Optimizer<Block<B>, B>>(name: &str, mut optimizer: O) {
    const STEPS: u64 = 3;
    let config = Float8Config::tensorwise().with_filter_fqns(["k"]).with_strict(true);
    let mut model: Block<B> = applied(&config, Block::new());
    let before = bits(model.v.weight.val());
    for _ in 0..STEPS {
        let grads = GradientsParams::from_grads(loss(&model).backward(), &model);
        model = optimizer.step(1e-2, model, grads);
    }
    assert_ne!(bits(model.v.weight.val()), before, "{name}");
    assert_kept(name, &model, STEPS);
}

fn assert_kept(name: &str, model: &Block<B>, uses: u64) {
    let report = own_report(model);
    for l in &report.layers {
        let expected = if l.name == "k" { [0, uses] } else { [uses, 0] };
        let found = calls(l).map(|calls| [calls[0], calls[2]]);
        assert_eq!(found, expected.map(|uses| [uses; 2]), "{name}: fprop and wgrad of {}", l.name);
    }
    report.verify().unwrap();
}

#[test]
fn layers_survive_optimizers() {
    let by_value = Some(GradientClippingConfig::Value(0.01));
    let by_norm = Some(GradientClippingConfig::Norm(0.1));
    keeps_every_layer("momentum", SgdConfig::new().with_momentum(Some(MomentumConfig::new())).init());
    keeps_every_layer("adam", AdamConfig::new().init());
    keeps_every_layer("adamw", AdamWConfig::new().with_weight_decay(0.1).init());
    keeps_every_layer("adamw, clipped by value", AdamWConfig::new().with_grad_clipping(by_value).init());
    keeps_every_layer("adamw, clipped by norm", AdamWConfig::new().with_grad_clipping(by_norm).init());
    keeps_every_layer("adan", AdanConfig::new().with_weight_decay(0.01).init());
    keeps_every_layer("rmsprop", RmsPropConfig::new().init());
    keeps_every_layer("adagrad", AdaGradConfig::new().init());
}

/// L-BFGS flattens all parameters into one vector and slices the new ones from it.
#[test]
fn lbfgs() {
    for line_search in [LineSearchFn::None, LineSearchFn::StrongWolfe] {
        let config = Float8Config::tensorwise().with_filter_fqns(["k"]);
        let mut model: Block<B> = applied(&config, Block::new());
        let lbfgs = LBFGSConfig::new().with_max_iter(4).with_line_search_fn(line_search);
        let mut optimizer = lbfgs.init::<B>();
        let (mut calls, mut losses) = (0, vec![]);
        for _ in 0..2 {
            (model, _) = optimizer.step(0.5, model, |model| {
                calls += 1;
                let loss = loss(&model);
                let value = values(loss.clone())[0];
                losses.push(value);
                (f64::from(value), GradientsParams::from_grads(loss.backward(), &model))
            });
        }
        let least = losses.iter().copied().fold(f32::MAX, f32::min);
        assert!(least < 0.95 * losses[0], "{line_search:?}: {losses:?}");
        assert_kept(&format!("{line_search:?}"), &model, calls);
    }
}

/// Muon multiplies gradients by each other. These are neither weights nor linears, so it never uses
/// FP8, also if a gradient is computed element-wise from the weight: it steps as without FP8.
#[test]
fn muon() {
    let linear = Float8LinearConfig::new(Recipe::Tensorwise).with_matmul(true);
    let mut model: Block<B> = applied(&Float8Config::from(linear).with_strict(true), Block::new());
    let mut plain: Block<Plain> = with_parameters(Block::new(), 1);
    let (mut ours, mut burns) = (MuonConfig::new().init(), MuonConfig::new().init());
    for _ in 0..4 {
        let penalty = model.linears().map(|l| l.weight.val().powf_scalar(2.0).sum());
        let penalty = penalty.into_iter().reduce(|a, b| a + b).expect("seven");
        let grads = (loss(&model) + penalty * 1e-2).backward();
        let mut same = GradientsParams::new();
        for (l, plain) in model.linears().into_iter().zip(plain.linears()) {
            same.register::<Flex, 2>(plain.weight.id, constant(dw(l, &grads)));
        }
        let grads = GradientsParams::from_grads(grads, &model);
        (model, plain) = (ours.step(2e-2, model, grads), burns.step(2e-2, plain, same));
        assert_eq!(model.linears().map(|l| bits(l.weight.val())), plain.linears().map(|l| bits(l.weight.val())));
    }
    let report = own_report(&model);
    for l in &report.layers {
        assert_eq!([float8_calls(l)[0], float8_calls(l)[2]], [4; 2], "{}", l.name);
        assert_eq!((l.weight_matmuls, l.totals().high_precision), (0, 0), "{}", l.name);
    }
    report.verify().unwrap();
}
