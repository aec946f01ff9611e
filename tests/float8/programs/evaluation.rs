//! Evaluations of the model, of an average or of a target network between forward and backward
//! change nothing. Losses, amax histories and samples equal a run without them, bit for bit.
use burn::module::{AutodiffModule, Module, ModuleMapper, ModuleVisitor, Param, ParamId};
use burn::optim::{AdamWConfig, GradientsParams, Optimizer};
use burn::tensor::Tensor;
use burn::tensor::backend::Backend;
use burn_float8::{
    Float8Config, Float8LinearConfig, Float8State, Recipe, StatisticsConfig, begin_float8_step, report::LayerReport,
};

use crate::programs::support::models::{Attention, D};
use crate::programs::support::{B, F8, applied, bits, own_report, tensor, unrelated_backward, with_parameters};

const STEPS: u64 = 4;

fn x<A: Backend>(seed: u64) -> Tensor<A, 3> {
    // Growing amaxes reveal a scale from another history.
    tensor::<A, 3>([2, 4, D], seed) * (1.0 + seed as f32)
}

/// `average ← 0.9 · average + 0.1 · model`, parameter by parameter, like an exponential moving
/// average.
fn follow(average: Attention<B>, model: &Attention<B>) -> Attention<B> {
    struct Collect(Vec<(ParamId, Tensor<B, 2>)>);
    impl ModuleVisitor<B> for Collect {
        fn visit_float<const R: usize>(&mut self, param: &Param<Tensor<B, R>>) {
            let dims: [usize; R] = param.dims();
            self.0.push((param.id, param.val().detach().reshape([dims[0], dims[1]])));
        }
    }
    struct Mix(std::vec::IntoIter<(ParamId, Tensor<B, 2>)>);
    impl ModuleMapper<B> for Mix {
        fn map_float<const R: usize>(&mut self, param: Param<Tensor<B, R>>) -> Param<Tensor<B, R>> {
            let (_, new) = self.0.next().expect("both have the same parameters");
            param.map(|old| {
                let dims: [usize; R] = old.dims();
                (old.detach() * 0.9 + new.reshape(dims) * 0.1).set_require_grad(false)
            })
        }
    }
    let mut parameters = Collect(vec![]);
    Module::<B>::visit(model, &mut parameters);
    average.map(&mut Mix(parameters.0.into_iter()))
}

/// Results of a run.
#[derive(Debug, PartialEq)]
struct Run {
    losses: Vec<u32>,
    state: Float8State,
    /// Health statistics of all operands of each layer, after each step.
    samples: Vec<String>,
}

fn samples(layers: &[LayerReport]) -> String {
    let health = |l: &LayerReport| {
        let gemms = l.gemms().map(|(gemm, g)| format!("{gemm}: {:?}", g.operands.each_ref().map(|o| &o.health)));
        format!("{} {}", l.name, gemms.join(" "))
    };
    layers.iter().map(health).collect::<Vec<_>>().join("\n")
}

/// Two micro-batches per step. Calls `evaluate` with the model and its average at each place.
fn run(recipe: Recipe, evaluate: impl Fn(&Attention<B>, &Attention<B>, u64, Place)) -> Run {
    let config = Float8Config::new(recipe).with_statistics(StatisticsConfig::every(1));
    let mut model: Attention<B> = applied(&config, Attention::new());
    let mut average = model.clone().no_grad();
    let mut optimizer = AdamWConfig::new().init::<B, Attention<B>>();
    let mut run = Run { losses: vec![], state: Float8State::default(), samples: vec![] };
    for step in 0..STEPS {
        let mut accumulator = burn::optim::GradientsAccumulator::new();
        for micro_batch in 0..2 {
            let seed = 2 * step + micro_batch;
            let loss = model.forward(x(seed)).powf_scalar(2.0).mean();
            run.losses.extend(bits(loss.clone()));
            evaluate(&model, &average, seed, Place::BeforeBackward);
            let grads = GradientsParams::from_grads(loss.backward(), &model);
            accumulator.accumulate(&model, grads);
        }
        evaluate(&model, &average, step, Place::BeforeStep);
        run.samples.push(samples(&own_report(&model).layers));
        model = optimizer.step(1e-2, model, accumulator.grads());
        average = follow(average, &model);
    }
    run.state = Float8State::export(&model);
    run
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Place {
    /// Between a forward and its backward.
    BeforeBackward,
    /// Between the last backward and the optimizer.
    BeforeStep,
}

/// Larger than any input, so that a trace of it is visible.
fn other<A: Backend>(seed: u64) -> Tensor<A, 3> {
    tensor::<A, 3>([2, 4, D], 500 + seed) * 100.0
}

/// Evaluates the model or its average, on other data or on the batch itself.
type Evaluate = fn(&Attention<B>, &Attention<B>, u64);

/// Another graph's backward drops the tensors that an evaluation saved.
const EVALUATIONS: [(&str, Evaluate); 7] = [
    ("valid", |model, _, seed| drop(model.valid().forward(other::<F8>(seed)))),
    ("valid on the batch", |model, _, seed| drop(model.valid().forward(x::<F8>(seed)))),
    // Its forward looks like a training forward until backward skips it.
    ("autodiff", |model, _, seed| drop(model.forward(other::<B>(seed)).detach())),
    ("average", |_, average, seed| drop(average.valid().forward(other::<F8>(seed)))),
    // Untracked, in the same forward pass.
    ("target network", |_, target, seed| drop(target.forward(other::<B>(seed)).detach())),
    ("target network on the batch", |_, target, seed| {
        target.forward(x::<B>(seed));
        unrelated_backward();
    }),
    ("dropped elsewhere", |model, _, seed| {
        with_parameters(model.clone(), 9).forward(x::<B>(seed));
        std::thread::spawn(unrelated_backward).join().unwrap();
    }),
];

/// Between a forward and its backward, or before the optimizer's step.
#[test]
fn evaluations_leave_no_trace() {
    for recipe in [Recipe::Delayed, Recipe::Tensorwise] {
        let without = run(recipe, |_, _, _, _| ());
        assert_eq!(without.state.step, STEPS);
        for (name, evaluate) in EVALUATIONS {
            for place in [Place::BeforeBackward, Place::BeforeStep] {
                // Backward is over for these tensors, but no weight is updated yet.
                if place == Place::BeforeStep && name != "valid" {
                    continue;
                }
                let with = run(recipe, |model, average, seed, at| {
                    if at == place {
                        evaluate(model, average, seed);
                    }
                });
                assert_eq!(with, without, "{recipe} {name} {place:?}");
            }
        }
    }
}

/// Steps begun manually. Calls `evaluate` before backward and after the optimizer's step.
fn by_hand(evaluate: impl Fn(&Attention<B>, &Attention<B>, u64, bool)) -> (Vec<u32>, Float8State) {
    let mut model: Attention<B> = applied(&Float8Config::new(Recipe::Delayed), Attention::new());
    let mut optimizer = AdamWConfig::new().init::<B, Attention<B>>();
    let mut average = model.clone().no_grad();
    let mut losses = vec![];
    for step in 0..STEPS {
        begin_float8_step(&model);
        let loss = model.forward(x(step)).powf_scalar(2.0).mean();
        losses.extend(bits(loss.clone()));
        evaluate(&model, &average, step, false);
        let grads = GradientsParams::from_grads(loss.backward(), &model);
        model = optimizer.step(1e-2, model, grads);
        average = follow(average, &model);
        evaluate(&model, &average, step, true);
    }
    (losses, Float8State::export(&model))
}

/// The same for a model whose steps begin manually, also if the evaluation reads the new weights
/// before their step has begun.
#[test]
fn evaluating_leaves_no_trace_where_steps_begin_by_hand() {
    let without = by_hand(|_, _, _, _| ());
    let evaluated = by_hand(|model, average, step, after_step| {
        average.valid().forward(other::<F8>(step));
        if !after_step {
            model.valid().forward(other::<F8>(step));
        }
    });
    assert_eq!(evaluated, without);
    let evaluated = by_hand(|model, _, step, after_step| {
        if after_step {
            model.valid().forward(other::<F8>(step));
        }
    });
    assert_eq!(evaluated, without);
}

/// Generating token by token casts each weight once, in fprop's orientation. This holds also if
/// training recasts it each time.
#[test]
fn a_model_that_was_trained_holds_one_copy_of_each_weight() {
    for recipe in [Recipe::Tensorwise, Recipe::Rowwise] {
        let recipe = Float8LinearConfig::new(recipe).with_force_recompute_fp8_weight_in_bwd(true);
        for config in [Float8Config::from(recipe.clone()), Float8Config::new(recipe.recipe())] {
            let model = applied::<B, _>(&config, Attention::new());
            let mut optimizer = AdamWConfig::new().init();
            let grads = model.forward(x(1)).mean().backward();
            let grads = GradientsParams::from_grads(grads, &model);
            let model = optimizer.step(0.01, model, grads).valid();
            let before: Vec<_> = own_report(&model).layers.iter().map(|l| l.casts[1]).collect();
            for token in 0..5 {
                model.forward(x::<F8>(token));
            }
            // The inputs of this thread's last linears stay alive, too.
            let other: Attention<F8> = applied(&Float8Config::new(Recipe::Rowwise), Attention::new());
            other.forward(x(9));
            for (layer, before) in own_report(&model).layers.iter().zip(before) {
                assert_eq!((layer.casts[1] - before, layer.live_copies), (1, 1), "{config:?} {}", layer.name);
            }
        }
    }
}
