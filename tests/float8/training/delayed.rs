//! Delayed scaling against a history kept by the test, step by step. Its state is saved and
//! restored exactly.
use burn::backend::Autodiff;
use burn::module::{AutodiffModule, Module};
use burn::nn::{Linear, LinearConfig};
use burn::optim::{AdamWConfig, GradientsAccumulator, GradientsParams, Optimizer};
use burn::tensor::Tensor;
use burn_float8::{
    Float8, Float8Config, Float8LinearConfig, Float8State, Recipe,
    backend::Float8Backend,
    begin_float8_step,
    config::{AmaxComputeAlgo, DelayedScaling},
    report,
};

use crate::on_cpu_and_wgpu;
use crate::support::model::{D, Model, input};
use crate::support::operand::{tensor, values};
use crate::support::oracle::{self, assert_within};
use crate::support::runtime::Flex;
use crate::support::{mean_square, normal, train, updated};

type A<B> = Float8<Autodiff<B>>;

const M: usize = 9;
const K: usize = 20;
const N: usize = 12;

fn config(amax_history_len: usize, amax_compute_algo: AmaxComputeAlgo, margin: i32) -> Float8LinearConfig {
    let delayed = DelayedScaling { amax_history_len, amax_compute_algo, margin };
    Float8LinearConfig::new(Recipe::Delayed).with_delayed_scaling(delayed)
}

/// One history, as documented.
struct History {
    config: DelayedScaling,
    amaxes: Vec<f32>,
    scaling: Option<f32>,
    fmax: f32,
}

impl History {
    fn new(config: DelayedScaling, fmax: f32) -> Self {
        Self { config, amaxes: vec![], scaling: None, fmax }
    }

    /// Ends a step with these amaxes.
    fn step(&mut self, observed: &[f32]) {
        let amax = observed.iter().copied().fold(0f32, f32::max);
        let valid = observed.iter().all(|a| a.is_finite()) && amax > 0.0;
        if valid {
            self.amaxes.insert(0, amax);
            self.amaxes.truncate(self.config.amax_history_len);
            let chosen = match self.config.amax_compute_algo {
                AmaxComputeAlgo::Max => self.amaxes.iter().copied().fold(0f32, f32::max),
                AmaxComputeAlgo::MostRecent => amax,
            };
            self.scaling = Some(chosen * 2f32.powi(self.config.margin));
        } else {
            // The scale is 1 if there is no earlier one.
            self.scaling.get_or_insert(self.fmax);
        }
    }
}

fn amax(values: &[f32]) -> f32 {
    values.iter().fold(0f32, |m, v| if v.is_nan() || m.is_nan() { f32::NAN } else { m.max(v.abs()) })
}

fn follows_its_history<B: Float8Backend>(runtime: &str, config: Float8LinearConfig) {
    let delayed = config.delayed_scaling();
    let mut linear: Linear<A<B>> = LinearConfig::new(K, N).with_bias(false).init(&Default::default());
    linear = Float8Config::from(config.clone()).apply(linear).unwrap().0;
    let mut histories = [448.0, 448.0, 57344.0].map(|fmax| History::new(delayed, fmax));
    // Amaxes rise and fall by factors that differ from the margin's. Some steps have two
    // micro-batches; some are not valid.
    let steps: [&[[f32; 2]]; 8] = [
        &[[1.0, 1.0]],
        &[[8.0, 0.1]],
        &[[0.5, 0.0]],
        &[[f32::INFINITY, 3.0]],
        &[[2.0, 5.0], [7.0, 0.3]],
        &[[1.0, f32::NAN], [1.5, 2.0]],
        &[[0.01, 1.0]],
        &[[1.0, 1.0]],
    ];
    for (step, micro_batches) in steps.into_iter().enumerate() {
        let mut observed = [const { vec![] }; 3];
        for (micro_batch, [fx, fdy]) in micro_batches.iter().enumerate() {
            let seed = 100 * step as u64 + micro_batch as u64;
            let scaled = |n, seed, factor: f32| -> Vec<f32> {
                let mut values = normal(n, seed);
                values.iter_mut().for_each(|v| *v *= if factor.is_finite() { factor } else { 1.0 });
                if !factor.is_finite() {
                    values[3] = factor;
                }
                values
            };
            let (xs, dys) = (scaled(M * K, seed + 1, *fx), scaled(M * N, seed + 2, *fdy));
            let ws = values(linear.weight.val());
            // An evaluation in between must not leave a trace.
            linear.valid().forward(tensor(scaled(M * K, seed + 3, 1e3), [M, K]));
            let x = tensor::<A<B>, 2>(xs.clone(), [M, K]).require_grad();
            let y = linear.forward(x.clone());
            let dy: Tensor<A<B>, 2> = tensor(dys.clone(), [M, N]);
            let grads = (y.clone() * dy).sum().backward();
            let ours = [values(y), values(x.grad(&grads).unwrap()), values(linear.weight.grad(&grads).unwrap())];
            if fx.is_finite() && fdy.is_finite() {
                let scaling = [0, 1, 2].map(|i| histories[i].scaling);
                let exact = oracle::linear([&xs, &ws, &dys], [M, K, N], None, &config, scaling);
                assert_within(&format!("{runtime} {delayed:?} step {step}"), &ours, &exact, [0.0; 3]);
            }
            for (observed, values) in observed.iter_mut().zip([&xs, &ws, &dys]) {
                observed.push(amax(values));
            }
        }
        // The weight is cast once a step.
        for (history, observed) in histories.iter_mut().zip(&observed) {
            history.step(observed);
        }
        linear = updated(linear);
    }
    let ran = &report(&linear).layers[0];
    assert_eq!(ran.policy, "delayed");
    assert_eq!(ran.fprop.high_precision, 0);
}

fn histories_on<B: Float8Backend>(runtime: &str) {
    use AmaxComputeAlgo::{Max, MostRecent};
    for (len, algo, margin) in [(1, Max, 0), (3, MostRecent, 1), (16, Max, -2)] {
        follows_its_history::<B>(runtime, config(len, algo, margin));
    }
}

#[test]
fn delayed_scales_follow_their_history() {
    on_cpu_and_wgpu!(histories_on);
}

fn model(config: Float8LinearConfig, blocks: usize) -> Model<A<Flex>> {
    Float8Config::from(config).apply(Model::new(blocks)).unwrap().0
}

/// Trains on inputs that double in each step.
fn trained(model: Model<A<Flex>>, steps: u64) -> Model<A<Flex>> {
    train(model, 0..steps, |m, step| mean_square(m.forward(input(step) * 2f32.powi(step as i32)))).0
}

/// q, k and v share x: the first layer that casts it owns the history, forward and backward.
#[test]
fn sharers_use_the_first_layers_history() {
    let state = Float8State::export(&trained(model(config(4, AmaxComputeAlgo::Max, 0), 1), 2));
    let inputs = |name: &str| state.layers[&format!("blocks.0.{name}")].input.is_some();
    assert_eq!(["q", "k", "v", "gate", "up"].map(inputs), [true, false, false, true, false]);
}

/// Positive amaxes in the history of a layer's input, newest first.
fn inputs(model: &Model<A<Flex>>, layer: &str) -> Vec<f32> {
    let state = Float8State::export(model);
    let history = state.layers[layer].input.as_ref().map(|amax| amax.history.clone()).unwrap_or_default();
    history.into_iter().map(f32::from_bits).filter(|amax| *amax > 0.0).collect()
}

/// A layer that a step skips, as it may skip an expert, neither delays nor repeats the steps of
/// other layers.
#[test]
fn layers_may_skip_steps() {
    let (model, _) = train(model(config(16, AmaxComputeAlgo::MostRecent, 0), 2), 0..6, |m, step| {
        let x = input(step) * 2f32.powi(step as i32);
        // Step 2 uses only the head.
        mean_square(if step == 2 { m.head.forward(x) } else { m.forward(x) })
    });
    // Ends the last step.
    model.valid().forward(input(9));
    assert_eq!(Float8State::export(&model).step, 7);
    let (q, head) = (inputs(&model, "blocks.0.q"), inputs(&model, "head"));
    assert_eq!((q.len(), head.len()), (5, 6));
    let amax = |step: u64| amax(&normal(2 * 4 * D, step)) * 2f32.powi(step as i32);
    assert_eq!(q, [5, 4, 3, 1, 0].map(amax), "newest first");
}

/// Frozen linears that get no backward, since no earlier layer is trained, have histories.
/// Evaluations on the same backend leave no trace in them: before a step, after it, or between its
/// micro-batches.
#[test]
fn linears_without_backward_have_histories() {
    let new = Model::<A<Flex>>::new(2);
    // Parameters are drawn when first read, so clones would draw others.
    new.forward(input(0));
    let run = |evaluates: bool| {
        let config = Float8Config::from(config(16, AmaxComputeAlgo::MostRecent, 2));
        let mut model = config.apply(new.clone()).unwrap().0;
        model.blocks[0] = model.blocks[0].clone().no_grad();
        let mut optimizer = AdamWConfig::new().init::<A<Flex>, Model<A<Flex>>>();
        let evaluate = |model: &Model<A<Flex>>| {
            if evaluates {
                model.clone().no_grad().forward(input(9) * 100.0);
            }
        };
        for step in 0..4 {
            begin_float8_step(&model);
            let mut accumulator = GradientsAccumulator::new();
            for micro_batch in 0..2 {
                evaluate(&model);
                let y = model.forward(input(2 * step + micro_batch) * 2f32.powi(step as i32));
                let grads = GradientsParams::from_grads(mean_square(y).backward(), &model);
                accumulator.accumulate(&model, grads);
                evaluate(&model);
            }
            model = optimizer.step(1e-3, model, accumulator.grads());
        }
        model
    };
    let model = run(false);
    let state = Float8State::export(&model);
    assert!(Float8State::export(&run(true)) == state);
    let largest = |step: u64| {
        let of = |seed: u64| amax(&normal(2 * 4 * D, seed));
        of(2 * step).max(of(2 * step + 1)) * 2f32.powi(step as i32)
    };
    let q = &state.layers["blocks.0.q"];
    let observed = q.input.as_ref().map(|input| f32::from_bits(input.observed[0]));
    assert_eq!(
        (observed, inputs(&model, "blocks.0.q")),
        (Some(largest(3)), [2, 1, 0].map(largest).to_vec()),
        "newest first"
    );
    assert!(q.grad_output.is_none());
    // A frozen weight is cast again once its history gives another scale than in the first step, as
    // in a resumed run.
    let frozen = amax(&values(model.blocks[0].q.weight.val()));
    let history = &q.weight.as_ref().unwrap().history;
    assert_eq!(history[..4], [frozen, frozen, frozen, 0.0].map(f32::to_bits));
    let report = report(&model);
    let [x, w] = &report.layers.iter().find(|layer| layer.name == "blocks.0.q").unwrap().fprop.operands;
    assert_eq!([x.scale, w.scale], [largest(2), frozen].map(|amax| Some(448.0 / (amax * 4.0))));
    assert_eq!(inputs(&model, "head").len(), 3);
}

/// A weight that is cast or scaled in forward is still the same parameter. A weight that is
/// computed otherwise needs [`begin_float8_step`].
#[test]
fn weights_may_be_computed_in_forward() {
    let steps = |weight: &dyn Fn(Tensor<A<Flex>, 2>) -> Tensor<A<Flex>, 2>, manual: bool| {
        let linear = LinearConfig::new(K, N).with_bias(false).init(&Default::default());
        let config = Float8Config::from(config(4, AmaxComputeAlgo::Max, 0));
        let mut linear: Linear<A<Flex>> = config.apply(linear).unwrap().0;
        for step in 0..3 {
            if manual {
                begin_float8_step(&linear);
            }
            for micro_batch in 0..4 {
                let x = tensor::<A<Flex>, 2>(normal(M * K, 10 * step + micro_batch), [M, K]);
                burn::tensor::module::linear(x, weight(linear.weight.val()), None).sum().backward();
            }
            linear = updated(linear);
        }
        Float8State::export(&linear).step
    };
    assert_eq!(steps(&|w| w, false), 3);
    assert_eq!(steps(&|w| w * 0.5, false), 3);
    assert_eq!(steps(&|w| w.cast(burn::tensor::DType::F64).cast(burn::tensor::DType::F32), false), 3);
    let merged = |w: Tensor<A<Flex>, 2>| w.clone() + Tensor::zeros_like(&w);
    assert_eq!(steps(&merged, false), 12, "each pass builds a weight");
    assert_eq!(steps(&merged, true), 3);
}

#[test]
fn a_state_of_another_model_is_an_error() {
    let history = |len| config(len, AmaxComputeAlgo::Max, 0);
    let (five, trained) = (history(5), trained(model(history(5), 2), 2));
    let state = Float8State::export(&trained);
    let error = |state: &Float8State, model: &Model<A<Flex>>| state.restore(model).unwrap_err().to_string();
    let filtered = Float8Config::from(five.clone()).with_filter_fqns(["head"]).apply(Model::new(2)).unwrap().0;
    let mut broken = state.clone();
    broken.step = u64::MAX;
    broken.layers.get_mut("head").unwrap().input.as_mut().unwrap().scaling_amax = Some(f32::NAN.to_bits());
    for (state, model, texts) in [
        (&state, model(five, 1), ["blocks.1.", "the model has no converted linear of this name"]),
        (&state, model(history(6), 2), ["amax_history_len: 5", "amax_history_len: 6"]),
        (&state, model(Float8LinearConfig::new(Recipe::Tensorwise), 2), ["the configuration none", ": tensorwise"]),
        (&state, filtered, ["head", "high precision"]),
        (&broken, trained.clone(), ["head", "an amax of input is NaN"]),
    ] {
        let error = error(state, &model);
        assert!(texts.iter().all(|text| error.contains(text)), "{error}");
    }
    broken.layers.clear();
    broken.restore(&trained).unwrap();
    trained.forward(input(1));
}
