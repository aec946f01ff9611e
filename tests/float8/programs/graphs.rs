//! Whole programs that rely on exact linears: recurrences, weight penalties, gradient checkpointing,
//! frozen layers, evaluation on many threads.
use std::cell::RefCell;
use std::sync::mpsc;
use std::time::Duration;

use burn::backend::autodiff::checkpoint::strategy::{BalancedCheckpointing, CheckpointStrategy, NoCheckpointing};
use burn::backend::{Autodiff, Flex};
use burn::module::Module;
use burn::nn::{Linear, LinearConfig};
use burn::optim::{AdamWConfig, GradientsParams, Optimizer};
use burn::tensor::Tensor;
use burn::tensor::activation::{relu, silu};
use burn::tensor::backend::{AutodiffBackend, Backend};
use burn_float8::{Float8, Float8Config, Float8State, Recipe, StatisticsConfig, float8_autocast};
use rayon::prelude::*;

use crate::programs::support::models::{Attention, D};
use crate::programs::support::{
    B, F8, applied, bits, constant, counters, float8_calls, has_float8_wgrad, high_precision_calls, layer_of,
    mean_square, own_report, tensor, train, values, with_parameters, x,
};

/// FP8 backend with a checkpointing strategy.
type Stack<C> = Float8<Autodiff<Flex, C>>;

fn square<A: Backend>() -> Linear<A> {
    LinearConfig::new(D, D).init(&Default::default())
}

fn dw<A: AutodiffBackend>(l: &Linear<A>, grads: &A::Gradients) -> Tensor<A::InnerBackend, 2> {
    l.weight.grad(grads).expect("tracked")
}

/// One linear used 50 times in one graph, in FP8 or not. The gradient is the sum of the gradients
/// of separate graphs, also if activations are recomputed.
#[test]
fn a_recurrence() {
    const USES: usize = 50;
    type IsOn = fn(usize) -> bool;
    fn recurrence<A: AutodiffBackend>(l: &Linear<A>, is_on: IsOn, is_tracked: bool) -> [Vec<u32>; 3] {
        let x = x::<A>(1).set_require_grad(is_tracked);
        let y = (0..USES).fold(x, |h, i| float8_autocast(is_on(i), || l.forward(h)).tanh());
        let grads = (y.clone() * tensor::<A, 2>([6, D], 2)).sum().backward();
        let db = l.bias.as_ref().expect("it has one").grad(&grads).expect("tracked");
        [bits(y), bits(dw(l, &grads)), bits(db)]
    }
    fn one_by_one(l: &Linear<B>, is_on: IsOn) -> [Vec<u32>; 3] {
        let step = |i: usize, h: Tensor<B, 2>| float8_autocast(is_on(i), || l.forward(h)).tanh();
        let mut inputs = vec![x::<B>(1)];
        for i in 0..USES {
            let y = step(i, inputs[i].clone());
            inputs.push(constant(y));
        }
        let y = inputs.pop().expect("the last output");
        let mut dy = tensor::<B, 2>([6, D], 2);
        let mut sums: Option<(Tensor<F8, 2>, Tensor<F8, 1>)> = None;
        for (i, h) in inputs.into_iter().enumerate().rev() {
            let h = h.require_grad();
            let grads = (step(i, h.clone()) * dy).sum().backward();
            let (dw, db) = (dw(l, &grads), l.bias.as_ref().expect("it has one").grad(&grads).expect("tracked"));
            sums = Some(match sums {
                Some((dw_sum, db_sum)) => (dw + dw_sum, db + db_sum),
                None => (dw, db),
            });
            dy = constant(h.grad(&grads).expect("tracked"));
        }
        let (dw, db) = sums.expect("one at least");
        [bits(y), bits(dw), bits(db)]
    }
    let precisions: [IsOn; 2] = [|_| true, |i| !i.is_multiple_of(3)];
    for recipe in Recipe::ALL {
        let config = Float8Config::new(recipe).with_strict(true);
        for (is_on, is_tracked) in precisions.into_iter().flat_map(|is_on| [(is_on, false), (is_on, true)]) {
            let l: Linear<B> = applied(&config, square());
            let got = recurrence(&l, is_on, is_tracked);
            assert_eq!(got, one_by_one(&applied(&config, square()), is_on), "{recipe} {is_tracked}");
            let balanced: Linear<Stack<BalancedCheckpointing>> = applied(&config, square());
            assert_eq!(recurrence(&balanced, is_on, is_tracked), got, "{recipe} {is_tracked}");

            let uses = |on: bool| (0..USES).filter(|i| is_on(*i) == on).count() as u64;
            let untracked = |on: bool| u64::from(!is_tracked && is_on(0) == on);
            let [mut float8, mut high] = [true, false].map(|on| [uses(on), uses(on) - untracked(on), uses(on)]);
            if !has_float8_wgrad(recipe) {
                (float8[2], high[2]) = (0, USES as u64);
            }
            for layer in [layer_of(&l, "linear"), layer_of(&balanced, "linear")] {
                let calls = [float8_calls(&layer), high_precision_calls(&layer)];
                assert_eq!(calls, [float8, high], "{recipe} {is_tracked}");
            }
        }
    }
}

/// Other readers of a weight add to its gradient and do not change the linear's.
#[test]
fn a_penalty_on_a_weight() {
    const STEPS: u64 = 3;
    /// x is computed, so backward reaches the linear before a penalty on the weight.
    fn loss(l: &Linear<B>) -> Tensor<B, 1> {
        (l.forward(x::<B>(1).require_grad() * 1.0) * tensor::<B, 2>([6, D], 2)).sum()
    }
    fn of_the_weight(l: &Linear<B>) -> Tensor<B, 1> {
        (l.weight.val() * l.weight.val()).sum()
    }
    fn of_a_product(l: &Linear<B>) -> Tensor<B, 1> {
        let w = l.weight.val() * 1.0;
        (w.clone() * w).sum()
    }
    for recipe in Recipe::ALL {
        let new = || -> Linear<B> { applied(&Float8Config::new(recipe).with_strict(true), square()) };
        let l = new();
        let gradient = |loss: Tensor<B, 1>| dw(&l, &loss.backward());
        let w: Tensor<F8, 2> = constant(l.weight.val());
        let alone = gradient(loss(&l));
        // In the order in which gradients reach the weight.
        let expected = bits(w.clone() + (w.clone() + alone.clone()));
        assert_eq!(bits(gradient(loss(&l) + of_the_weight(&l))), expected, "{recipe}");
        assert_eq!(bits(gradient(of_the_weight(&l) + loss(&l))), expected, "{recipe}");
        let expected = bits(alone + (w.clone() + w));
        assert_eq!(bits(gradient(loss(&l) + of_a_product(&l))), expected, "{recipe}");
        assert_eq!(bits(gradient(of_a_product(&l) + loss(&l))), expected, "{recipe}");

        let (l, _) = train(new(), 0..STEPS, |l, _| loss(l) + of_the_weight(l) + of_a_product(l));
        // The optimizer's weight still belongs to the layer.
        loss(&l);
        let (layer, wgrads) = (layer_of(&l, "linear"), if has_float8_wgrad(recipe) { STEPS } else { 0 });
        assert_eq!(float8_calls(&layer), [STEPS + 1, STEPS, wgrads], "{recipe}");
        assert_eq!(high_precision_calls(&layer), [0, 0, STEPS - wgrads], "{recipe}");
        assert_eq!(Float8State::export(&l).step, STEPS + 1, "{recipe}");
        own_report(&l).verify().unwrap();
    }
}

/// Results that gradient checkpointing must not change.
#[derive(Debug, PartialEq)]
struct Run {
    losses: Vec<u32>,
    state: Float8State,
    /// FP8 and high-precision calls, casts, matmuls; recomputation adds no casts.
    counters: Vec<(String, [[u64; 3]; 3], u64)>,
    health: Vec<String>,
}

impl Run {
    fn new<C: CheckpointStrategy>(recipe: Recipe) -> Self {
        let config = Float8Config::new(recipe).with_statistics(StatisticsConfig::every(1)).with_strict(true);
        let model: Attention<Stack<C>> = applied(&config, Attention::new());
        let (model, losses) = train(model, 0..6, |m, step| {
            // Growing amaxes reveal a scale from another step.
            let x = tensor::<Stack<C>, 3>([2, 4, D], step) * (1.0 + step as f32);
            // Checkpointing keeps neither the shared input of q, k and v nor o's input.
            let x = relu(m.embed.forward(x)) + 0.1;
            let (q, k, v) = (m.q.forward(x.clone()), m.k.forward(x.clone()), m.v.forward(x));
            let h = silu(q.clone() * 0.5) * k.tanh() + relu(v);
            mean_square(m.o.forward(h + q))
        });
        let gemms = own_report(&model).layers.into_iter().flat_map(|l| [l.fprop, l.dgrad, l.wgrad]);
        let health = gemms.map(|gemm| format!("{:?}", gemm.operands.map(|o| o.health)));
        Self {
            losses: losses.into_iter().map(f32::to_bits).collect(),
            state: Float8State::export(&model),
            counters: counters(&model),
            health: health.collect(),
        }
    }
}

#[test]
fn checkpointing_changes_nothing() {
    for recipe in [Recipe::Tensorwise, Recipe::RowwiseWithGwHp, Recipe::Delayed, Recipe::Mxfp8] {
        assert_eq!(Run::new::<BalancedCheckpointing>(recipe), Run::new::<NoCheckpointing>(recipe), "{recipe}");
    }
}

/// k is skipped in two steps, as with stochastic depth, and resumes with larger activations.
#[test]
fn checkpointing_with_a_layer_left_out() {
    type Gradients = Vec<[Option<Vec<u32>>; 2]>;
    fn run<C: CheckpointStrategy>() -> (Gradients, Float8State) {
        let mut model: Attention<Stack<C>> = applied(&Float8Config::new(Recipe::Delayed), Attention::new());
        let mut optimizer = AdamWConfig::new().init::<Stack<C>, Attention<Stack<C>>>();
        let mut gradients = vec![];
        for (uses_k, scale) in [(true, 1e-3), (false, 1.0), (false, 1.0), (true, 1.0), (true, 0.5)] {
            let y = model.q.forward(tensor::<Stack<C>, 2>([8, D], 1) * scale);
            // Recomputed in backward.
            let h = y.clone() + y;
            let y = if uses_k { model.k.forward(h) } else { h };
            let grads = y.powf_scalar(2.0).sum().backward();
            gradients.push([&model.q, &model.k].map(|l| l.weight.grad(&grads).map(bits)));
            let grads = GradientsParams::from_grads(grads, &model);
            model = optimizer.step(1e-3, model, grads);
        }
        (gradients, Float8State::export(&model))
    }
    let expected = run::<NoCheckpointing>();
    let has_k: Vec<_> = expected.0.iter().map(|[_, k]| k.is_some()).collect();
    assert_eq!(has_k, [true, false, false, true, true]);
    assert_eq!(run::<BalancedCheckpointing>(), expected);
}

/// A frozen linear between two trained ones has a dgrad, and the histories of all its casts
/// advance.
#[test]
fn a_frozen_weight_in_the_middle() {
    const STEPS: u64 = 6;
    let mut model: Attention<B> = Attention::new();
    model.v = model.v.no_grad();
    let model = applied(&Float8Config::new(Recipe::Delayed).with_strict(true), model);
    let amax = |values: Vec<f32>| values.into_iter().fold(0.0f32, |amax, v| amax.max(v.abs())).to_bits();
    let of_w = amax(values(model.v.weight.val()));
    let of_x = RefCell::new(vec![]);
    let (model, _) = train(model, 0..STEPS, |m, step| {
        let h = m.embed.forward(x::<B>(1) * (1.0 + step as f32));
        of_x.borrow_mut().push(amax(values(h.clone())));
        mean_square(m.o.forward(m.v.forward(h)))
    });
    for (name, expected) in [("embed", [STEPS, 0, STEPS]), ("v", [STEPS, STEPS, 0]), ("o", [STEPS; 3])] {
        let layer = layer_of(&model, name);
        assert_eq!((float8_calls(&layer), high_precision_calls(&layer)), (expected, [0; 3]), "{name}");
    }
    let state = Float8State::export(&model);
    assert_eq!(state.step, STEPS);
    // Newest first; the last step is not over.
    let v = &state.layers["v"];
    let [input, weight, mut grad_output] = [&v.input, &v.weight, &v.grad_output].map(|history| {
        let history = history.clone().expect("v has histories");
        let ended: Vec<u32> = history.history.into_iter().take_while(|amax| *amax > 0).collect();
        [history.observed, ended].concat()
    });
    assert_eq!(input, of_x.into_inner().into_iter().rev().collect::<Vec<_>>());
    // The weight is cast once for all steps.
    assert_eq!(weight, [of_w]);
    grad_output.dedup();
    assert_eq!(grad_output.len() as u64, STEPS, "a new one in each step");
}

/// `batches.par_iter().map(|batch| model.forward(batch))`: a pool thread that waits for parts of a
/// cast may steal another forward on the same weights.
#[test]
fn an_evaluation_on_rayons_pool_ends() {
    const N: usize = 512;
    const DEPTH: usize = 16;
    fn evaluate(model: &[Linear<F8>], depth: usize) -> Vec<u32> {
        let x = Tensor::<F8, 2>::ones([2, N], &Default::default());
        bits(model.iter().take(depth).fold(x, |x, l| l.forward(x)))
    }
    let (ended, end) = mpsc::channel();
    std::thread::spawn(move || {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(16).build().expect("threads");
        let linears = (0..DEPTH).map(|_| LinearConfig::new(N, N).init::<F8>(&Default::default()));
        let weights: Vec<Linear<F8>> = with_parameters(linears.collect(), 1);
        // Weights without casts, as after each optimizer step.
        let new = || Float8Config::tensorwise().apply(weights.clone()).unwrap().0;
        let model = new();
        let expected: Vec<_> = pool.install(|| (0..=DEPTH).map(|depth| evaluate(&model, depth)).collect());
        for round in 0..6 {
            let model = new();
            // Some evaluations stop early.
            let depths = (0..64usize).into_par_iter().with_max_len(1).map(|i| (i * 7919 + round * 31) % (DEPTH + 1));
            let all: Vec<_> = pool.install(|| depths.map(|depth| (depth, evaluate(&model, depth))).collect());
            for (depth, y) in all {
                assert!(y == expected[depth], "round {round}, {depth} linears");
            }
        }
        ended.send(()).expect("the test waits");
    });
    end.recv_timeout(Duration::from_secs(300)).expect("it ends, with the numbers of one forward after the other");
}
