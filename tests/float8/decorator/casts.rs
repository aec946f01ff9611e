//! Guarantees of the decorator: one cast where one is enough, short-lived copies, and tags that
//! survive training.
use std::sync::Arc;

use burn::module::{AutodiffModule, Module};
use burn::nn::{Linear, LinearConfig, LinearLayout};
use burn::optim::{AdamWConfig, GradientsAccumulator, GradientsParams, Optimizer, SgdConfig};
use burn::tensor::{Tensor, module};
use burn_float8::backend::Float8Backend;
use burn_float8::{Float8, Float8Config, Float8LinearConfig, Float8Stack, Recipe, Report, StatisticsConfig, report};

use crate::on_every_runtime;
use crate::support::linear::A;
use crate::support::model::{Model, input};
use crate::support::operand::{tensor, values};
use crate::support::runtime::Flex;
use crate::support::{linear, mean_square, normal};

type B = A<Flex>;

fn applied(recipe: Recipe, blocks: usize) -> Model<B> {
    Float8Config::new(recipe).apply(Model::<B>::new(blocks)).unwrap().0
}

/// Casts of `[x, w, dy]`, summed over layers.
fn casts(report: &Report) -> [u64; 3] {
    report.layers.iter().fold([0; 3], |sum, l| [0, 1, 2].map(|i| sum[i] + l.casts[i]))
}

fn live(report: &Report) -> u64 {
    report.layers.iter().map(|l| l.live_copies).sum()
}

/// One cast gives both orientations, whether they share scales or, as in MX, each have their own.
#[test]
fn operands_are_cast_once() {
    for recipe in [Recipe::Tensorwise, Recipe::Mxfp8] {
        let mut model = applied(recipe, 2);
        let mut optimizer = AdamWConfig::new().init::<B, Model<B>>();
        let mut seen = [0; 3];
        for _ in 0..2 {
            let mut accumulator = GradientsAccumulator::new();
            for micro_batch in 0..3 {
                // Forward: each block reads four tensors (x for q, k, v; o's input; x for gate, up;
                // down's input), and the head reads one. Each of the 15 linears casts its weight once,
                // in the step's first micro-batch.
                let y = model.forward(input::<B>(micro_batch).require_grad());
                let forward = casts(&report(&model));
                let weights = if micro_batch == 0 { 15 } else { 0 };
                assert_eq!([0, 1, 2].map(|i| forward[i] - seen[i]), [9, weights, 0], "{recipe}");
                // Backward: each of the 15 output gradients in one pass.
                let grads = mean_square(y).backward();
                accumulator.accumulate(&model, GradientsParams::from_grads(grads, &model));
                let backward = casts(&report(&model));
                assert_eq!([0, 1, 2].map(|i| backward[i] - forward[i]), [0, 0, 15], "{recipe}");
                seen = backward;
            }
            model = optimizer.step(1e-3, model, accumulator.grads());
        }
    }
}

#[test]
fn copies_live_no_longer_than_needed() {
    // Each weight has one copy for fprop and one for dgrad. Each x has its transpose, shared by all
    // linears that read it. The last two x also keep their other copy.
    let (weights, inputs) = (|blocks: u64| 7 * blocks + 1, |blocks: u64| 4 * blocks + 1);
    for blocks in [1, 4] {
        let model = applied(Recipe::Tensorwise, blocks as usize);
        let x = input::<B>(1).require_grad();
        let y = model.forward(x.clone());
        assert_eq!(live(&report(&model)), 2 * weights(blocks) + inputs(blocks) + 2, "{blocks} blocks, after forward");
        let grads = mean_square(y).backward();
        assert_eq!(live(&report(&model)), 2 * weights(blocks), "{blocks} blocks, after backward");
        let grads = GradientsParams::from_grads(grads, &model);
        let model = SgdConfig::new().init::<B, Model<B>>().step(0.1, model, grads);
        assert_eq!(live(&report(&model)), 0, "{blocks} blocks, after the step");
        drop(x);
    }
}

/// The first linear casts x for all. One in high precision does not separate those around it.
#[test]
fn q_k_and_v_share_one_cast_of_x() {
    let model = Float8Config::tensorwise().with_filter_fqns(["blocks.0.k"]).apply(Model::<B>::new(1)).unwrap().0;
    model.forward(input(1));
    let report = report(&model);
    let of = |name| report.layers.iter().find(|layer| layer.name.ends_with(name)).expect("a layer");
    let casts = [".q", ".k", ".v", ".gate", ".up"].map(|name| of(name).casts[0]);
    assert_eq!(casts, [1, 0, 0, 1, 0]);
}

/// Histories, samples and the last amaxes refer to their layer, but it is freed with its model.
#[test]
fn layers_are_freed_with_their_model() {
    for recipe in Recipe::ALL {
        let config = Float8Config::new(recipe).with_statistics(StatisticsConfig::every(1));
        let model = config.apply(Model::<B>::new(1)).unwrap().0;
        let grads = mean_square(model.forward(input(1))).backward();
        let grads = GradientsParams::from_grads(grads, &model);
        let mut optimizer = AdamWConfig::new().init::<B, Model<B>>();
        let model = optimizer.step(1e-3, model, grads);
        // Without autodiff, whose graph outlives its tensors.
        model.valid().forward(input(2));
        let weight = model.blocks[0].q.weight.val().into_primitive().tensor();
        let layer = Arc::downgrade(&B::layer(&weight).expect("converted"));
        drop((model, optimizer, weight));
        // The thread keeps its last two activations until its next linears.
        applied(Recipe::Tensorwise, 1).valid().forward(input(3));
        assert!(layer.upgrade().is_none(), "{recipe}");
    }
}

/// `LinearLayout::Col` has its own mappers, which the tag must not replace.
#[test]
fn records_of_column_major_linears_still_load() {
    let new = || LinearConfig::new(8, 4).with_layout(LinearLayout::Col).init::<B>(&Default::default());
    let [linear, other] = [(); 2].map(|()| Float8Config::tensorwise().apply(new()).unwrap().0);
    let loaded = other.load_record(linear.clone().into_record());
    assert_eq!(loaded.weight.dims(), [8, 4]);
    assert_eq!(values(loaded.weight.val()), values(linear.weight.val()));
    assert_eq!(report(&loaded).layers[0].name, "linear");
}

/// Frozen parameters, and inputs without gradients.
#[test]
fn only_what_is_tracked_is_saved() {
    // No copy of the weight is kept either, so the live copies are x's.
    let config = Float8LinearConfig::new(Recipe::Tensorwise).with_force_recompute_fp8_weight_in_bwd(true);
    let layer = linear::layer::<Flex>(&config.into(), tensor(normal(200, 2), [20, 10]), None);
    let other = linear::layer::<Flex>(&Float8Config::tensorwise(), tensor(normal(200, 2), [20, 10]), None);
    let x = || tensor::<B, 2>(normal(160, 1), [8, 20]);
    // Pushes out the last two activations, which the thread keeps.
    let live = || {
        (0..2).for_each(|_| drop(other.valid().forward(x().inner())));
        report(&layer).layers[0].live_copies
    };

    // x untracked: its copy for dw is saved until backward.
    let y = layer.forward(x());
    let want = values(y.clone());
    assert_eq!(live(), 1);
    let casts = || report(&layer).layers[0].casts[0];
    let in_forward = casts();
    let grads = y.sum().backward();
    assert!(layer.weight.grad(&grads).is_some());
    assert_eq!((live(), casts()), (0, in_forward), "backward casts no x");
    // Weight frozen: no copy of x is kept.
    let frozen = Linear { weight: layer.weight.clone().map(|w| w.set_require_grad(false)), bias: None };
    let tracked = x().require_grad();
    let of_tracked = frozen.forward(tracked.clone());
    assert_eq!(live(), 0);
    assert!(tracked.grad(&of_tracked.sum().backward()).is_some());
    // Nothing tracked: a plain linear.
    let untracked = frozen.forward(x());
    assert_eq!(live(), 0);
    assert_eq!(values(untracked), want);
}

fn threads_on<B: Float8Backend>(runtime: &str) {
    let w: Tensor<Float8<B>, 2> = tensor(normal(64 * 32, 2), [64, 32]);
    let x: Tensor<Float8<B>, 2> = tensor(normal(16 * 64, 1), [16, 64]);
    let want = values(module::linear(x.clone(), w.clone(), None));
    std::thread::scope(|scope| {
        for is_shared in [true, false, true, false] {
            let (x, w, want) = (x.clone(), w.clone(), &want);
            scope.spawn(move || {
                let x = if is_shared { x } else { x * 1.0 };
                for _ in 0..4 {
                    assert_eq!(values(module::linear(x.clone(), w.clone(), None)), *want, "{runtime}");
                }
            });
        }
    });
}

/// With fusion and without.
#[test]
fn threads_share_the_copies_of_a_weight() {
    on_every_runtime!(threads_on);
}
