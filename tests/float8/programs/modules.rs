//! burn-nn's modules: `apply` finds their linears, a training step runs all three GEMMs of each in
//! FP8, and losses fall.
use std::sync::{Arc, Mutex};

use burn::module::{Module, Param, ParamId};
use burn::nn::transformer::{TransformerDecoderConfig, TransformerDecoderInput};
use burn::nn::{Embedding, EmbeddingConfig, GruConfig, Linear, LinearConfig, Lstm, LstmConfig};
use burn::tensor::backend::Backend;
use burn::tensor::{Int, Tensor, TensorData};
use burn_float8::{Float8Config, Float8LinearConfig, Recipe};

use crate::programs::support::{
    B, Plain, applied, assert_all_in_float8, assert_falls, bits, float8_calls, high_precision_calls, mean_square,
    own_report, tensor, to_target, train, with_parameters,
};

const STEPS: u64 = 8;
const BATCH: usize = 3;
const TOKENS: usize = 4;
const D: usize = 16;
const VOCABULARY: usize = 12;

/// Tracked, so that the first linears have a dgrad too.
fn x() -> Tensor<B, 3> {
    tensor::<B, 3>([BATCH, TOKENS, D], 90).require_grad()
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

/// burn-nn's LSTM, whose four gates read one x, with one in high precision.
#[test]
fn an_lstm_with_a_filtered_gate() {
    const H: usize = 8;
    let config = Float8Config::tensorwise().with_filter_fqns(["input_gate"]).with_strict(true);
    let model: Lstm<B> = applied(&config, LstmConfig::new(D, H, true).init(&Default::default()));
    let (model, losses) = train(model, 0..STEPS, |m, _| mean_square(m.forward(tensor([BATCH, TOKENS, D], 1), None).0));
    assert_falls(&losses);
    let report = own_report(&model);
    assert_eq!(report.layers.len(), 8);
    for l in &report.layers {
        let calls = STEPS * TOKENS as u64;
        // x and the initial hidden state need no gradient. A weight is cast once for all time steps
        // of a step, in each direction that is needed.
        let (dgrads, casts) = if l.name.ends_with("hidden_transform") { (calls - STEPS, 2) } else { (0, 1) };
        let want = ([calls, dgrads, calls], [0; 3]);
        if l.name.starts_with("input_gate") {
            assert_eq!((high_precision_calls(l), float8_calls(l)), want, "{}", l.name);
        } else {
            assert_eq!((float8_calls(l), high_precision_calls(l)), want, "{}", l.name);
            assert_eq!(l.casts[1], casts * STEPS, "{}", l.name);
        }
    }
    report.verify().unwrap();
}

#[derive(Module, Debug)]
struct Tied<B: Backend> {
    embedding: Embedding<B>,
    body: Linear<B>,
}

impl<B: Backend> Tied<B> {
    fn new() -> Self {
        let device = Default::default();
        Self {
            embedding: EmbeddingConfig::new(VOCABULARY, D).init(&device),
            body: LinearConfig::new(D, D).init(&device),
        }
    }

    /// `[batch, tokens]` to `[batch * tokens, VOCABULARY]`.
    fn forward(&self, tokens: Tensor<B, 2, Int>) -> Tensor<B, 2> {
        let h = self.body.forward(self.embedding.forward(tokens)).flatten::<2>(0, 1);
        self.logits(h)
    }

    fn logits(&self, h: Tensor<B, 2>) -> Tensor<B, 2> {
        h.matmul(self.embedding.weight.val().transpose())
    }
}

fn tokens<B: Backend>() -> Tensor<B, 2, Int> {
    let ids: Vec<i32> = (0..12).map(|i| (i * 5 + 1) % VOCABULARY as i32).collect();
    Tensor::from_data(TensorData::new(ids, [2, 6]), &Default::default())
}

/// A tied output is a matmul with the embedding, which is no weight of a linear. Neither strictness
/// nor the matmul option applies.
#[test]
fn a_tied_output_is_never_float8_and_nothing_else_breaks() {
    let linear = Float8LinearConfig::new(Recipe::Tensorwise).with_matmul(true);
    let config = Float8Config::from(linear).with_strict(true);
    let model: Tied<B> = applied(&config, Tied::new());
    let plain: Tied<Plain> = with_parameters(Tied::new(), 1);
    let h = [5, D];
    assert_eq!(bits(model.logits(tensor(h, 1))), bits(plain.logits(tensor(h, 1))));
    let (model, losses) = train(model, 0..STEPS, |m, _| to_target(m.forward(tokens())));
    assert_falls(&losses);
    assert_all_in_float8(&model, &["body"], STEPS);
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
