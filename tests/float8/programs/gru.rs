//! GRU uses `Tensor::matmul`: the report counts it, and the option `matmul` runs it in FP8 like a
//! linear.
use burn::nn::{BiGruConfig, Gru, GruConfig, Linear, LinearConfig};
use burn::tensor::Tensor;
use burn_float8::{Float8Config, Float8Error, Float8LinearConfig, Recipe};

use crate::support::{
    B, applied, assert_falls, bits, float8_calls, forward_backward, layer_of, own_report, tensor, train,
};

const D: usize = 16;
const H: usize = 8;
const TOKENS: usize = 3;
const STEPS: u64 = 6;

fn gru(config: &Float8Config, bias: bool) -> Gru<B> {
    applied(config, GruConfig::new(D, H, bias).with_reset_after(false).init::<B>(&Default::default()))
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

/// Strict mode concerns GEMMs of linears, so a module without them may use matmuls.
#[test]
fn without_the_option_the_report_says_that_matmuls_read_the_weights() {
    let config = Float8Config::tensorwise().with_strict(true);
    let (model, losses) = train(gru(&config, true), 0..STEPS, |m, _| loss(m.forward(x(), None)));
    assert_falls(&losses);
    let report = own_report(&model);
    assert_eq!(report.layers.len(), 6);
    for l in &report.layers {
        assert_eq!(l.weight_matmuls, STEPS * TOKENS as u64, "{}", l.name);
        let totals = l.totals();
        assert_eq!([totals.native, totals.emulated], [0; 2], "{}", l.name);
    }
    let reads = report.layers[0].weight_matmuls;
    assert!(report.to_string().contains(&format!("{reads} reads by Tensor::matmul, not FP8")), "{report}");
    let error = report.verify().unwrap_err();
    let Float8Error::NeverCalled { layer, .. } = &error else { panic!("{error}") };
    assert_eq!(layer, "update_gate.input_transform");
    assert!(error.to_string().contains(&reads.to_string()), "the text counts the matmuls: {error}");
}

#[test]
fn with_the_option_all_three_gemms_run_in_float8() {
    for recipe in [Recipe::Tensorwise, Recipe::Rowwise, Recipe::Delayed] {
        let config = with_matmul(recipe).with_strict(true);
        let (model, losses) = train(gru(&config, true), 0..STEPS, |m, _| loss(m.forward(x(), None)));
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

#[test]
fn bi_gru() {
    let model = BiGruConfig::new(D, H, true).init::<B>(&Default::default());
    let model = applied(&with_matmul(Recipe::Tensorwise), model);
    let (model, losses) = train(model, 0..STEPS, |m, _| loss(m.forward(x(), None).0));
    assert_falls(&losses);
    let report = own_report(&model);
    assert_eq!(report.layers.len(), 12);
    report.verify().unwrap();
    assert_eq!(report.totals().high_precision, 0);
}

/// A matmul with a weight equals the linear of the same weight bit for bit, in y and both
/// gradients.
#[test]
fn a_matmul_is_the_linear_of_the_same_weight() {
    for recipe in Recipe::ALL {
        let new = || LinearConfig::new(40, 24).with_bias(false).init::<B>(&Default::default());
        let (x, dy) = (tensor::<B, 2>([9, 40], 1), tensor::<B, 2>([9, 24], 2));
        let linear: Linear<B> = applied(&Float8Config::new(recipe), new());
        let expected = forward_backward(x.clone(), linear.weight.val(), dy.clone(), |x| linear.forward(x));
        let other: Linear<B> = applied(&with_matmul(recipe), new());
        let ours = forward_backward(x, other.weight.val(), dy, |x| x.matmul(other.weight.val()));
        assert_eq!(ours, expected, "{recipe}");
        let l = layer_of(&other, "linear");
        let wgrads = if recipe == Recipe::RowwiseWithGwHp || recipe == Recipe::Mxfp8WgradWithHp { 0 } else { 1 };
        assert_eq!([l.fprop.emulated, l.dgrad.emulated, l.wgrad.emulated], [1, 1, wgrads], "{recipe}");
    }
}

/// burn-nn's LSTM gate is a GRU gate through `nn::Linear`.
#[test]
fn a_gru_computes_what_its_linears_would() {
    let model = gru(&with_matmul(Recipe::Tensorwise), false);
    let linears = gru(&Float8Config::tensorwise(), false);
    let y = model.forward(x(), None);
    let by_linears = |m: &Gru<B>, x: Tensor<B, 3>| {
        let mut hidden = Tensor::<B, 2>::zeros([2, H], &Default::default());
        let mut outputs = vec![];
        for t in 0..TOKENS {
            let x = x.clone().slice([0..2, t..t + 1, 0..D]).squeeze_dim::<2>(1);
            let gate = |g: &burn::nn::GateController<B>, h: &Tensor<B, 2>| g.gate_product(x.clone(), h.clone());
            let update = burn::tensor::activation::sigmoid(gate(&m.update_gate, &hidden));
            let reset = burn::tensor::activation::sigmoid(gate(&m.reset_gate, &hidden));
            let new = gate(&m.new_gate, &(hidden.clone().mul(reset))).tanh();
            hidden = new.mul(update.clone().neg().add_scalar(1.0)) + update.mul(hidden);
            outputs.push(hidden.clone().unsqueeze_dim::<3>(1));
        }
        Tensor::cat(outputs, 1)
    };
    let expected = by_linears(&linears, x());
    assert_eq!(bits(y.clone()), bits(expected.clone()));
    let (grads, expected) = (loss(y).backward(), loss(expected).backward());
    let pairs = [
        (&model.update_gate, &linears.update_gate),
        (&model.reset_gate, &linears.reset_gate),
        (&model.new_gate, &linears.new_gate),
    ];
    for (ours, theirs) in pairs {
        let pairs =
            [(&ours.input_transform, &theirs.input_transform), (&ours.hidden_transform, &theirs.hidden_transform)];
        for (ours, theirs) in pairs {
            let [ours, theirs] = [(ours, &grads), (theirs, &expected)].map(|(l, g)| bits(l.weight.grad(g).unwrap()));
            assert_eq!(ours, theirs);
        }
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
    // As many reads as in a long sequence.
    let l: Linear<B> = applied(&with_matmul(Recipe::Tensorwise), LinearConfig::new(D, D).init(&Default::default()));
    let y = (0..1100).fold(tensor::<B, 2>([6, D], 1).require_grad(), |x, _| x.matmul(l.weight.val()).tanh());
    y.sum().backward();
    assert_eq!(float8_calls(&layer_of(&l, "linear")), [1100; 3]);
    // Other forwards whose graphs are dropped first.
    let l: Linear<B> = applied(&with_matmul(Recipe::Tensorwise), LinearConfig::new(D, D).init(&Default::default()));
    let forward = |seed| tensor::<B, 2>([6, D], seed).require_grad().matmul(l.weight.val()).sum();
    let y = forward(1);
    (0..100).for_each(|seed| drop(forward(seed)));
    y.backward();
    assert_eq!(float8_calls(&layer_of(&l, "linear")), [101, 1, 1]);
}
