//! Whole programs that rely on exact linears: recurrences, gradient checkpointing, evaluation on
//! many threads.
use std::sync::mpsc;
use std::time::Duration;

use burn::backend::autodiff::checkpoint::strategy::{BalancedCheckpointing, CheckpointStrategy, NoCheckpointing};
use burn::backend::{Autodiff, Flex};
use burn::nn::{Linear, LinearConfig};
use burn::tensor::Tensor;
use burn::tensor::activation::{relu, silu};
use burn::tensor::backend::{AutodiffBackend, Backend};
use burn_float8::{Float8, Float8Config, Float8State, Recipe, StatisticsConfig, float8_autocast, report::LayerReport};
use rayon::prelude::*;

use crate::programs::support::models::{Block, D};
use crate::programs::support::{
    B, F8, applied, bits, calls, constant, dw, mean_square, own_report, tensor, train, with_parameters, x,
};

/// FP8 backend with a checkpointing strategy.
type Stack<C> = Float8<Autodiff<Flex, C>>;

fn square<A: Backend>() -> Linear<A> {
    LinearConfig::new(D, D).init(&Default::default())
}

fn db<A: AutodiffBackend>(l: &Linear<A>, grads: &A::Gradients) -> Tensor<A::InnerBackend, 1> {
    l.bias.as_ref().and_then(|bias| bias.grad(grads)).expect("tracked")
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
        [bits(y), bits(dw(l, &grads)), bits(db(l, &grads))]
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
        let (mut dws, mut dbs) = (vec![], vec![]);
        for (i, h) in inputs.into_iter().enumerate().rev() {
            let h = h.require_grad();
            let grads = (step(i, h.clone()) * dy).sum().backward();
            dws.push(dw(l, &grads));
            dbs.push(db(l, &grads));
            dy = constant(h.grad(&grads).expect("tracked"));
        }
        let dw = dws.into_iter().reduce(|sum, dw| dw + sum).expect("one at least");
        let db = dbs.into_iter().reduce(|sum, db| db + sum).expect("one at least");
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
        }
    }
}

/// Other readers of a weight add to its gradient and do not change the linear's.
#[test]
fn a_penalty_on_a_weight() {
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
    }
}

/// Losses, state and report of a training run. k is skipped in two steps, as with stochastic depth,
/// and resumes with larger activations.
fn trained<C: CheckpointStrategy>(recipe: Recipe) -> (Vec<u32>, Float8State, Vec<LayerReport>) {
    let config = Float8Config::new(recipe).with_statistics(StatisticsConfig::every(1)).with_strict(true);
    let model: Block<Stack<C>> = applied(&config, Block::new());
    let (model, losses) = train(model, 0..6, |m, step| {
        // Growing amaxes reveal a scale from another step.
        let x = tensor::<Stack<C>, 3>([2, 4, D], step) * (1.0 + step as f32);
        // Checkpointing keeps neither the shared input of q, k and v nor gate's input.
        let x = relu(m.o.forward(x)) + 0.1;
        let (q, v) = (m.q.forward(x.clone()), m.v.forward(x.clone()));
        let k = if [2, 3].contains(&step) { x } else { m.k.forward(x) };
        let h = silu(q.clone() * 0.5) * k.tanh() + relu(v);
        mean_square(m.gate.forward(h + q))
    });
    // Recomputation adds no calls, casts, samples or copies.
    let losses = losses.into_iter().map(f32::to_bits).collect();
    (losses, Float8State::export(&model), own_report(&model).layers)
}

#[test]
fn checkpointing_changes_nothing() {
    for recipe in [Recipe::Tensorwise, Recipe::RowwiseWithGwHp, Recipe::Delayed, Recipe::Mxfp8] {
        let expected = trained::<NoCheckpointing>(recipe);
        assert_eq!(expected.2.iter().map(|l| calls(l)[0][0]).collect::<Vec<_>>(), [6, 4, 6, 6, 6, 0, 0], "{recipe}");
        assert_eq!(trained::<BalancedCheckpointing>(recipe), expected, "{recipe}");
    }
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
