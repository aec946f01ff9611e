//! burn-nn's recurrent modules: `apply` finds their linears, training runs each GEMM of each time
//! step as configured, and losses fall.
use std::sync::{Arc, Mutex};

use burn::module::{Param, ParamId};
use burn::nn::{GruConfig, Linear, Lstm, LstmConfig};
use burn::tensor::Tensor;
use burn_float8::{Float8Config, Float8LinearConfig, Recipe};

use crate::programs::support::models::D;
use crate::programs::support::{
    B, applied, assert_falls, calls, float8_calls, mean_square, own_report, tensor, to_target, train,
};

const STEPS: u64 = 8;
const BATCH: usize = 3;
const TOKENS: usize = 4;

fn x() -> Tensor<B, 3> {
    tensor([BATCH, TOKENS, D], 90)
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

/// burn-nn's LSTM, whose four gates read one x, with one in high precision.
#[test]
fn an_lstm_with_a_filtered_gate() {
    const H: usize = 8;
    let config = Float8Config::tensorwise().with_filter_fqns(["input_gate"]).with_strict(true);
    let model: Lstm<B> = applied(&config, LstmConfig::new(D, H, true).init(&Default::default()));
    let (model, losses) = train(model, 0..STEPS, |m, _| mean_square(m.forward(x(), None).0));
    assert_falls(&losses);
    let report = own_report(&model);
    assert_eq!(report.layers.len(), 8);
    for l in &report.layers {
        let uses = STEPS * TOKENS as u64;
        // x and the initial hidden state need no gradient. A weight is cast once for all time steps
        // of a step, in each direction that is needed.
        let (dgrads, casts) = if l.name.ends_with("hidden_transform") { (uses - STEPS, 2) } else { (0, 1) };
        let ran = [uses, dgrads, uses];
        if l.name.starts_with("input_gate") {
            assert_eq!(calls(l), [[0; 3], ran], "{}", l.name);
        } else {
            assert_eq!((calls(l), l.casts[1]), ([ran, [0; 3]], casts * STEPS), "{}", l.name);
        }
    }
    report.verify().unwrap();
}

/// Parameter that adds its number to `order` when it is drawn.
fn noted<const R: usize>(order: &Arc<Mutex<Vec<usize>>>, number: usize, shape: [usize; R]) -> Param<Tensor<B, R>> {
    let order = order.clone();
    let draw = move |device: &_, _| {
        order.lock().unwrap().push(number);
        Tensor::ones(shape, device).require_grad()
    };
    Param::uninitialized(ParamId::new(), draw, Default::default(), true, shape.into())
}

/// `apply` initializes parameters in the order of a plain module visit.
#[test]
fn parameters_are_drawn_in_the_order_of_the_module() {
    let order = Arc::default();
    let linear = |i: usize| Linear { weight: noted(&order, 2 * i, [D, D]), bias: Some(noted(&order, 2 * i + 1, [D])) };
    Float8Config::tensorwise().apply((0..3).map(linear).collect::<Vec<_>>()).unwrap();
    assert_eq!(*order.lock().unwrap(), [0, 1, 2, 3, 4, 5]);
}
