//! Delayed scaling against a history kept by the test, step by step. Its state is saved and
//! restored exactly.
use burn::module::{AutodiffModule, Module};
use burn::optim::{AdamWConfig, GradientsAccumulator, GradientsParams, Optimizer};
use burn::tensor::{DType, Tensor};
use burn_float8::backend::Float8Backend;
use burn_float8::config::{AmaxComputeAlgo, DelayedScaling};
use burn_float8::{Float8Config, Float8Error, Float8LinearConfig, Float8State, Recipe, begin_float8_step, report};
use float8_kernels::reference;

use crate::on_cpu_and_wgpu;
use crate::support::linear::{A, forward_backward, layer};
use crate::support::model::{D, Model, input};
use crate::support::operand::{tensor, values};
use crate::support::oracle::{self, assert_within};
use crate::support::runtime::Flex;
use crate::support::{mean_square, normal, train, updated};

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
    /// Ends a step with these amaxes.
    fn step(&mut self, observed: &[f32]) {
        let amax = reference::amax(observed);
        if amax.is_finite() && amax > 0.0 {
            self.amaxes.insert(0, amax);
            self.amaxes.truncate(self.config.amax_history_len);
            let chosen = match self.config.amax_compute_algo {
                AmaxComputeAlgo::Max => reference::amax(&self.amaxes),
                AmaxComputeAlgo::MostRecent => amax,
            };
            self.scaling = Some(chosen * 2f32.powi(self.config.margin));
        } else {
            // The scale is 1 if there is no earlier one.
            self.scaling.get_or_insert(self.fmax);
        }
    }
}

fn histories_on<B: Float8Backend>(runtime: &str) {
    use AmaxComputeAlgo::{Max, MostRecent};
    for config in [config(1, Max, 0), config(3, MostRecent, 1), config(16, Max, -2)] {
        let delayed = config.delayed_scaling();
        let mut linear = layer::<B>(&config.clone().into(), tensor(normal(K * N, 1), [K, N]), None);
        let mut histories =
            [448.0, 448.0, 57344.0].map(|fmax| History { config: delayed, amaxes: vec![], scaling: None, fmax });
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
                // Infinity and NaN take one element.
                let scaled = |n, seed, factor: f32| -> Vec<f32> {
                    let (all, fourth) = if factor.is_finite() { (factor, 1.0) } else { (1.0, factor) };
                    let mut values: Vec<_> = normal(n, seed).into_iter().map(|v| v * all).collect();
                    values[3] *= fourth;
                    values
                };
                let (xs, dys) = (scaled(M * K, seed + 1, *fx), scaled(M * N, seed + 2, *fdy));
                let ws = values(linear.weight.val());
                // An evaluation in between must not leave a trace.
                linear.valid().forward(tensor(scaled(M * K, seed + 3, 1e3), [M, K]));
                let (x, dy) = (tensor::<A<B>, 2>(xs.clone(), [M, K]), tensor(dys.clone(), [M, N]));
                let ours = forward_backward::<B, 2>(&linear, x, dy);
                if fx.is_finite() && fdy.is_finite() {
                    let scaling = [0, 1, 2].map(|i| histories[i].scaling);
                    let exact = oracle::linear([&xs, &ws, &dys], [M, K, N], None, &config, scaling);
                    assert_within(&format!("{runtime} {delayed:?} step {step}"), &ours, &exact, [0.0; 3]);
                }
                for (observed, values) in observed.iter_mut().zip([&xs, &ws, &dys]) {
                    observed.push(reference::amax(values));
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
/// other layers. In the next step its history is outdated: its own amax sets the scale.
#[test]
fn layers_may_skip_steps() {
    let mut model = model(config(16, AmaxComputeAlgo::MostRecent, 0), 2);
    let x = |step: u64| input::<A<Flex>>(step) * 2f32.powi(step as i32);
    let amax = |step: u64| x(step).abs().max().into_scalar();
    // The step of the amax that scales x. Step 2 uses only the head.
    for (step, scaled_by) in [(0, Some(0)), (1, Some(0)), (2, None), (3, Some(3)), (4, Some(3))] {
        let y = if scaled_by.is_some() { model.forward(x(step)) } else { model.head.forward(x(step)) };
        mean_square(y).backward();
        let layers = report(&model).layers;
        let q = layers.iter().find(|layer| layer.name == "blocks.0.q").unwrap();
        let want = scaled_by.map(|by| 448.0 / amax(by));
        assert!(want.is_none() || q.fprop.operands[0].scale == want, "step {step}: {q:?}, not {want:?}");
        model = updated(model);
    }
    // Ends the last step.
    model.valid().forward(input(9));
    assert_eq!(Float8State::export(&model).step, 6);
    assert_eq!(inputs(&model, "blocks.0.q"), [4, 3, 1, 0].map(amax), "newest first");
    assert_eq!(inputs(&model, "head").len(), 5);
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
        let of = |seed: u64| reference::amax(&normal(2 * 4 * D, seed));
        of(2 * step).max(of(2 * step + 1)) * 2f32.powi(step as i32)
    };
    let q = &state.layers["blocks.0.q"];
    assert_eq!(q.input.as_ref().unwrap().observed, [largest(3).to_bits()]);
    assert_eq!(inputs(&model, "blocks.0.q"), [2, 1, 0].map(largest), "newest first");
    assert!(q.grad_output.is_none());
    // A frozen weight is cast again once its history gives another scale than in the first step, as
    // in a resumed run.
    let frozen = reference::amax(&values(model.blocks[0].q.weight.val()));
    let history = &q.weight.as_ref().unwrap().history;
    assert_eq!(history[..4], [frozen, frozen, frozen, 0.0].map(f32::to_bits));
    let report = report(&model);
    let [x, w] = &report.layers.iter().find(|layer| layer.name == "blocks.0.q").unwrap().fprop.operands;
    assert_eq!([x.scale, w.scale], [largest(2), frozen].map(|amax| Some(448.0 / (amax * 4.0))));
    assert_eq!(inputs(&model, "head").len(), 3);
}

/// A weight that is cast or scaled in forward is still the same parameter. A weight that is computed
/// otherwise begins a step in each pass, unless the program does.
#[test]
fn weights_may_be_computed_in_forward() {
    type W = Tensor<A<Flex>, 2>;
    let cast: fn(W) -> W = |w| w.cast(DType::F64).cast(DType::F32);
    let scaled: fn(W) -> W = |w| w * 0.5;
    let merged: fn(W) -> W = |w| w.clone() + Tensor::zeros_like(&w);
    for (weight, is_manual, want) in [(cast, false, 3), (scaled, false, 3), (merged, false, 12), (merged, true, 3)] {
        let config = config(4, AmaxComputeAlgo::Max, 0).into();
        let mut linear = layer::<Flex>(&config, tensor(normal(K * N, 1), [K, N]), None);
        for step in 0..3 {
            if is_manual {
                begin_float8_step(&linear);
            }
            for micro_batch in 0..4 {
                let x = tensor::<A<Flex>, 2>(normal(M * K, 10 * step + micro_batch), [M, K]);
                burn::tensor::module::linear(x, weight(linear.weight.val()), None).sum().backward();
            }
            linear = updated(linear);
        }
        assert_eq!(Float8State::export(&linear).step, want);
    }
}

#[test]
fn a_state_that_does_not_fit_is_an_error() {
    let history = |len| config(len, AmaxComputeAlgo::Max, 0);
    let (five, trained) = (history(5), trained(model(history(5), 2), 2));
    let state = Float8State::export(&trained);
    let filtered = Float8Config::from(five.clone()).with_filter_fqns(["head"]).apply(Model::new(2)).unwrap().0;
    let broken = |amax: f32| {
        let mut broken = state.clone();
        broken.step = u64::MAX;
        broken.layers.get_mut("head").unwrap().input.as_mut().unwrap().scaling_amax = Some(amax.to_bits());
        broken
    };
    for (state, model, texts) in [
        (state.clone(), model(five, 1), ["blocks.1.", "the model has no converted linear of this name"]),
        (state.clone(), model(history(6), 2), ["amax_history_len: 5", "amax_history_len: 6"]),
        (state.clone(), model(Float8LinearConfig::new(Recipe::Tensorwise), 2), ["configuration none", ": tensorwise"]),
        (state.clone(), filtered, ["head", "high precision"]),
        // No scale can be made of these.
        (broken(f32::NAN), trained.clone(), ["head", "an amax of input is NaN"]),
        (broken(0.0), trained.clone(), ["head", "an amax of input is 0"]),
        (broken(-0.0), trained.clone(), ["head", "an amax of input is -0"]),
    ] {
        let error = state.restore(&model).unwrap_err();
        assert!(matches!(error, Float8Error::State { .. }), "{error:?}");
        assert!(texts.iter().all(|text| error.to_string().contains(text)), "{error}");
    }
    let mut broken = broken(1.0);
    broken.layers.clear();
    broken.restore(&trained).unwrap();
    trained.forward(input(1));
}
