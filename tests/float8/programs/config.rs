//! Configuration: filters as closures, custom layer types, configurations applied again, models
//! returned in errors.
use burn::module::{Module, Param};
use burn::nn::{Embedding, EmbeddingConfig, Linear, LinearConfig};
use burn::tensor::backend::Backend;
use burn::tensor::{Tensor, module::linear};
use burn_float8::{
    ApplyError, Float8Config, Float8Error, Float8LinearConfig, Float8State, Recipe, config::LinearInfo, without_float8,
};

use crate::programs::support::models::{D, Mlp};
use crate::programs::support::{
    B, Plain, applied, assert_falls, bits, calls, float8_calls, layer, layer_of, mean_square, own_report, panic_of,
    to_target, train, with_parameters, x,
};

#[test]
fn a_closure_decides_which_linears_stay() {
    let seen = std::sync::Mutex::new(vec![]);
    let config = Float8Config::tensorwise().with_strict(true);
    let (model, summary) = config
        .apply_with(Mlp::<B>::new(), |l: &LinearInfo| {
            seen.lock().unwrap().push((l.name.clone(), l.k, l.n));
            l.n > 4
        })
        .unwrap();
    let mut seen = seen.into_inner().unwrap();
    seen.dedup();
    assert_eq!(seen, [("first".to_string(), D, 2 * D), ("second".to_string(), 2 * D, 4)]);
    assert_eq!(summary.converted, ["first"]);
    assert_eq!(summary.skipped, [("second".to_string(), "filter function".to_string())]);
    // A filter that panics changes nothing.
    panic_of(|| drop(config.apply_with(model.clone(), |_| panic!("filter"))));
    model.forward(x(1));
    let report = own_report(&model);
    assert_eq!(["first", "second"].map(|name| calls(layer(&report, name)).map(|ran| ran[0])), [[1, 0], [0, 1]]);
    assert_eq!(layer(&report, "second").fprop.reason.as_deref(), Some("filter function"));
    // The configuration's own filters still apply.
    let both = config.with_filter_fqns(["first"]).apply_with(Mlp::<B>::new(), |l| l.n > 4);
    let error = both.unwrap_err().error;
    assert!(matches!(error, Float8Error::NothingConverted { linears: 2, .. }), "{error}");
}

/// Projection with a differently named matrix, as in models ported from other frameworks.
#[derive(Module, Debug)]
struct Proj<B: Backend> {
    kernel: Param<Tensor<B, 2>>,
}

/// Custom linear with a field `weight`, and one parameter that belongs to no linear.
#[derive(Module, Debug)]
struct MyLinear<B: Backend> {
    weight: Param<Tensor<B, 2>>,
    table: Param<Tensor<B, 2>>,
}

#[derive(Module, Debug)]
struct Custom<B: Backend> {
    embedding: Embedding<B>,
    up: MyLinear<B>,
    down: Proj<B>,
    head: Linear<B>,
}

impl<B: Backend> Custom<B> {
    fn new() -> Self {
        let device = Default::default();
        let matrix = |k, n| Param::from_tensor(Tensor::ones([k, n], &device));
        Self {
            embedding: EmbeddingConfig::new(D, D).init(&device),
            up: MyLinear { weight: matrix(D, 2 * D), table: matrix(D, D) },
            down: Proj { kernel: matrix(2 * D, D) },
            head: LinearConfig::new(D, 4).init(&device),
        }
    }

    /// An output that is tied to the embedding.
    fn tied(&self, x: Tensor<B, 2>) -> Tensor<B, 2> {
        x.matmul(self.embedding.weight.val().transpose())
    }

    fn forward(&self, x: Tensor<B, 2>) -> Tensor<B, 2> {
        let x = self.tied(x).matmul(self.up.table.val());
        let h = linear(x, self.up.weight.val(), None).tanh();
        self.head.forward(linear(h, self.down.kernel.val(), None))
    }
}

#[test]
fn layers_of_types_of_ones_own() {
    // Neither strictness nor the matmul option applies to the embedding and the table.
    let linear = Float8LinearConfig::new(Recipe::Tensorwise).with_matmul(true);
    let config = Float8Config::from(linear).with_module_types(["MyLinear", "Proj.kernel"]).with_strict(true);
    let (model, summary) = config.apply(with_parameters(Custom::<B>::new(), 1)).unwrap();
    assert_eq!(summary.converted, ["up", "down.kernel", "head"]);
    let plain: Custom<Plain> = with_parameters(Custom::new(), 1);
    assert_eq!(bits(model.tied(x(1))), bits(plain.tied(x(1))));
    let (model, losses) = train(model, 0..8, |m, _| to_target(m.forward(x(1))));
    assert_falls(&losses);
    let report = own_report(&model);
    assert_eq!(report.layers.iter().map(|l| l.name.as_str()).collect::<Vec<_>>(), summary.converted);
    assert!(report.layers.iter().all(|l| calls(l) == [[8; 3], [0; 3]]), "{report}");
    report.verify().unwrap();
    // A type that is not named is not found and stays in high precision.
    let (other, summary) = Float8Config::tensorwise().apply(with_parameters(Custom::<B>::new(), 1)).unwrap();
    assert_eq!(summary.converted, ["head"]);
    other.forward(x(1));
    assert_eq!(own_report(&other).layers.len(), 1);
    // Filters see the same names.
    let filtered = config.with_filter_fqns(["down"]).apply(Custom::<B>::new()).unwrap().1;
    assert_eq!(filtered.skipped[0].0, "down.kernel");
    let types = |names: &[&str]| Float8Config::tensorwise().with_module_types(names.iter().copied());
    let json = serde_json::to_string(&types(&["Proj.kernel"])).unwrap();
    let read: Float8Config = serde_json::from_str(&json).unwrap();
    assert_eq!(read.apply(Custom::<B>::new()).unwrap().1.converted, ["down.kernel", "head"]);
    // Two weights in one type have two names. A weight that the model lacks is an error.
    let both = types(&["MyLinear", "MyLinear.table"]).apply(Custom::<B>::new()).unwrap().1;
    assert_eq!(both.converted, ["up", "up.table", "head"]);
    for wrong in ["MyLinear.weights", "Linear.bias"] {
        let error = types(&["MyLinear", wrong]).apply(Custom::<B>::new()).unwrap_err().error;
        let expected = format!("module_types = {wrong:?}: the model has no parameter of rank 2 that it names");
        assert_eq!(error.to_string(), expected);
    }
}

#[test]
fn errors_give_the_model_back() {
    let model: Mlp<B> = with_parameters(Mlp::new(), 3);
    let weight = bits(model.first.weight.val());
    let error = Float8Config::tensorwise().with_filter_fqns(["frist"]).apply(model).unwrap_err();
    assert!(error.to_string().contains("frist"), "{error}");
    let ApplyError { error, model } = error;
    assert!(matches!(error, Float8Error::Config { key: "filter_fqns", .. }), "{error}");
    assert_eq!(bits(model.first.weight.val()), weight);
    let model = Float8Config::tensorwise().with_filter_fqns(["first"]).apply(*model).unwrap().0;
    model.forward(x(1));
    assert_eq!(float8_calls(&layer_of(&model, "second"))[0], 1);
    // A model with an applied configuration keeps it.
    let error = Float8Config::tensorwise().with_filter_fqns(["nothing"]).apply(model).unwrap_err();
    assert_eq!(layer_of(&*error.model, "first").policy, "high precision: filter \"first\"");
}

#[derive(Module, Debug)]
struct TwoLists<B: Backend> {
    encoder: Vec<Linear<B>>,
    decoder: Vec<Linear<B>>,
}

#[test]
fn the_first_of_two_equally_long_lists_has_the_layers() {
    let list = || (0..2).map(|_| LinearConfig::new(D, D).init::<B>(&Default::default())).collect();
    let config = Float8Config::tensorwise().with_layers_in_high_precision(1, 0);
    let summary = config.apply(TwoLists { encoder: list(), decoder: list() }).unwrap().1;
    assert_eq!(summary.converted, ["encoder.1", "decoder.0", "decoder.1"]);
}

/// An equal configuration keeps counters and histories. Another one forgets reasons, and each
/// reverts `without_float8`.
#[test]
fn applying_again() {
    let config = Float8Config::new(Recipe::Delayed);
    let model: Mlp<B> = applied(&config, Mlp::new());
    let (model, _) = train(model, 0..3, |m, _| mean_square(m.forward(x(1))));
    let state = Float8State::export(&model);
    let again = config.apply(without_float8(model)).unwrap().0;
    assert_eq!(Float8State::export(&again), state);
    again.forward(x(1));
    assert_eq!(float8_calls(&layer_of(&again, "first"))[0], 4);

    let (filtered, _) = Float8Config::tensorwise().with_filter_fqns(["first"]).apply(again).unwrap();
    filtered.forward(x(1));
    let of = |model: &Mlp<B>| {
        let layer = layer_of(model, "first");
        (calls(&layer).map(|ran| ran[0]), layer.fprop.reason)
    };
    assert_eq!(of(&filtered), ([0, 1], Some("filter \"first\"".into())));
    let model = Float8Config::tensorwise().apply(without_float8(filtered)).unwrap().0;
    assert_eq!(of(&model), ([0, 0], None));
    model.forward(x(1));
    assert_eq!(of(&model), ([1, 0], None));
}
