//! Evaluations of the model, of other weights or of a target network between forward and backward
//! change nothing. Losses, amax histories and samples equal a run without them, bit for bit.
use burn::module::{AutodiffModule, Module};
use burn::optim::{AdamWConfig, GradientsAccumulator, GradientsParams, Optimizer};
use burn::tensor::Tensor;
use burn::tensor::backend::Backend;
use burn_float8::{
    Float8Config, Float8LinearConfig, Float8State, Recipe, StatisticsConfig, begin_float8_step, report::LayerReport,
    report::OperandHealth,
};

use crate::programs::support::models::{Block, D};
use crate::programs::support::{
    B, F8, applied, bits, float8_calls, mean_square, own_report, tensor, unrelated_backward, with_parameters,
};
use crate::support::updated;

const STEPS: u64 = 4;

fn x<A: Backend>(seed: u64) -> Tensor<A, 3> {
    // Growing amaxes reveal a scale from another history.
    tensor::<A, 3>([2, 4, D], seed) * (1.0 + seed as f32)
}

/// Results of a run.
#[derive(Debug, Default, PartialEq)]
struct Run {
    losses: Vec<u32>,
    state: Float8State,
    /// Health statistics of all operands of each layer, after each step.
    samples: Vec<[[Option<OperandHealth>; 2]; 3]>,
    /// FP8 calls of dgrad and wgrad of each layer.
    backward_calls: Vec<[u64; 2]>,
}

fn samples(layer: &LayerReport) -> [[Option<OperandHealth>; 2]; 3] {
    layer.gemms().map(|(_, gemm)| gemm.operands.each_ref().map(|operand| operand.health.clone()))
}

/// Time of an evaluation in a step.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Place {
    BeforeForward,
    /// Between a forward and its backward.
    BeforeBackward,
    /// The same, on another thread.
    OnAnotherThread,
    /// On another thread during backward. Not with linears of a graph: two threads that use one
    /// graph may deadlock in Burn's autodiff.
    DuringBackward,
    /// Between the last backward and the optimizer.
    BeforeStep,
    /// After the optimizer. The next step has not begun if steps begin manually.
    AfterStep,
}

/// Evaluates the model, or other weights of its layers, on other data or on the batch itself.
type Evaluate = fn(&Block<B>, &Block<B>, u64);

/// Two micro-batches per step. Steps may begin manually.
fn run(recipe: Recipe, begins_manually: bool, evaluation: Option<(Evaluate, Place)>) -> Run {
    let config = Float8Config::new(recipe).with_statistics(StatisticsConfig::every(1));
    let mut model: Block<B> = applied(&config, Block::new());
    let mut others = model.clone().no_grad();
    let mut optimizer = AdamWConfig::new().init::<B, Block<B>>();
    let mut run = Run::default();
    let evaluate_at = |place, model: &Block<B>, others: &Block<B>, seed| {
        if let Some((evaluate, _)) = evaluation.filter(|(_, at)| *at == place) {
            evaluate(model, others, seed);
        }
    };
    for step in 0..STEPS {
        if begins_manually {
            begin_float8_step(&model);
        }
        let mut accumulator = GradientsAccumulator::new();
        for micro_batch in 0..2 {
            let seed = 2 * step + micro_batch;
            evaluate_at(Place::BeforeForward, &model, &others, seed);
            let loss = mean_square(model.forward(x(seed)));
            run.losses.extend(bits(loss.clone()));
            evaluate_at(Place::BeforeBackward, &model, &others, seed);
            let grads = std::thread::scope(|scope| {
                scope.spawn(|| evaluate_at(Place::OnAnotherThread, &model, &others, seed)).join().expect("no panic");
                scope.spawn(|| evaluate_at(Place::DuringBackward, &model, &others, seed));
                loss.backward()
            });
            accumulator.accumulate(&model, GradientsParams::from_grads(grads, &model));
        }
        evaluate_at(Place::BeforeStep, &model, &others, step);
        run.samples.extend(own_report(&model).layers.iter().map(samples));
        model = optimizer.step(1e-2, model, accumulator.grads());
        others = updated(others).no_grad();
        evaluate_at(Place::AfterStep, &model, &others, step);
    }
    run.state = Float8State::export(&model);
    run.backward_calls = own_report(&model).layers.iter().map(|l| [float8_calls(l)[1], float8_calls(l)[2]]).collect();
    run
}

/// Larger than any input, so that a trace of it is visible.
fn other<A: Backend>(seed: u64) -> Tensor<A, 3> {
    tensor::<A, 3>([2, 4, D], 500 + seed) * 100.0
}

const VALID: Evaluate = |model, _, seed| drop(model.valid().forward(other::<F8>(seed)));
/// Its forward looks like a training forward until backward skips it.
const GRAPH: Evaluate = |model, _, seed| drop(model.forward(other::<B>(seed)).detach());
const OTHERS: Evaluate = |_, others, seed| drop(others.valid().forward(other::<F8>(seed)));
/// Untracked, in the same forward pass.
const TARGET: Evaluate = |_, target, seed| drop(target.forward(other::<B>(seed)).detach());

/// Evaluations in automatic steps. Another graph's backward drops the tensors that an evaluation
/// saved.
const EVALUATIONS: [(&str, Evaluate, Place); 14] = [
    ("valid", VALID, Place::BeforeBackward),
    ("valid", VALID, Place::OnAnotherThread),
    ("valid", VALID, Place::DuringBackward),
    // Backward is over for these tensors, but no weight is updated yet.
    ("valid", VALID, Place::BeforeStep),
    ("valid on the batch", |model, _, seed| drop(model.valid().forward(x::<F8>(seed))), Place::BeforeBackward),
    ("graph", GRAPH, Place::BeforeBackward),
    ("graph", GRAPH, Place::OnAnotherThread),
    ("graph that is kept", |model, _, seed| std::mem::forget(model.forward(other::<B>(seed))), Place::BeforeBackward),
    (
        "graph dropped before",
        |model, _, seed| {
            model.forward(other::<B>(seed));
            unrelated_backward();
        },
        Place::BeforeForward,
    ),
    (
        "graph dropped elsewhere",
        |model, _, seed| {
            with_parameters(model.clone(), 9).forward(x::<B>(seed));
            std::thread::spawn(unrelated_backward).join().unwrap();
        },
        Place::BeforeBackward,
    ),
    ("others", OTHERS, Place::BeforeBackward),
    ("target network", TARGET, Place::BeforeBackward),
    ("target network", TARGET, Place::OnAnotherThread),
    (
        "target network on the batch",
        |_, target, seed| {
            target.forward(x::<B>(seed));
            unrelated_backward();
        },
        Place::BeforeBackward,
    ),
];

#[test]
fn evaluations_leave_no_trace() {
    for recipe in [Recipe::Delayed, Recipe::Tensorwise] {
        let without = run(recipe, false, None);
        assert_eq!(without.state.step, STEPS);
        for (name, evaluate, place) in EVALUATIONS {
            assert_eq!(run(recipe, false, Some((evaluate, place))), without, "{recipe} {name} {place:?}");
        }
    }
}

/// An evaluation may read the new weights before their step has begun.
#[test]
fn evaluating_leaves_no_trace_where_steps_begin_manually() {
    let without = run(Recipe::Delayed, true, None);
    for (evaluate, place) in
        [VALID, OTHERS].into_iter().flat_map(|e| [(e, Place::BeforeBackward), (e, Place::AfterStep)])
    {
        assert_eq!(run(Recipe::Delayed, true, Some((evaluate, place))), without, "{place:?}");
    }
}

/// Generating token by token casts each weight once, in fprop's orientation, and takes no
/// statistics. This holds after training too, also if it recasts each time.
#[test]
fn a_model_that_is_evaluated_holds_one_copy_of_each_weight() {
    // The inputs of this thread's last linears stay alive.
    let flush = || drop(applied::<F8, _>(&Float8Config::tensorwise(), Block::new()).forward(x(9)));
    for (recipe, recomputes) in [Recipe::Tensorwise, Recipe::Rowwise].into_iter().flat_map(|r| [(r, true), (r, false)])
    {
        let linear = Float8LinearConfig::new(recipe).with_force_recompute_fp8_weight_in_bwd(recomputes);
        let config = Float8Config::from(linear).with_statistics(StatisticsConfig::every(1));
        let new = applied::<B, _>(&config, Block::new());
        let trained = applied::<B, _>(&config, Block::new());
        let grads = GradientsParams::from_grads(trained.forward(x(1)).mean().backward(), &trained);
        let trained = AdamWConfig::new().init().step(0.01, trained, grads);
        let below = applied::<F8, _>(&config, Block::new());
        for (model, is_new) in [(trained.valid(), false), (new.valid(), true), (below, true)] {
            let before: Vec<_> = own_report(&model).layers.iter().map(|l| l.casts[1]).collect();
            (0..5).for_each(|token| drop(model.forward(x::<F8>(token))));
            flush();
            for (layer, before) in own_report(&model).layers.iter().zip(before) {
                assert_eq!((layer.casts[1] - before, layer.live_copies), (1, 1), "{config:?} {}", layer.name);
                let is_sampled = layer.fprop.operands.iter().any(|operand| operand.health.is_some());
                assert!(!is_new || !is_sampled, "{}", layer.name);
            }
        }
        let frozen = new.no_grad();
        frozen.forward(x(1));
        flush();
        assert_eq!(own_report(&frozen).layers.iter().map(|l| l.live_copies).collect::<Vec<_>>(), [1; 7]);
    }
}
