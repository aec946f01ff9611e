//! Linears that ranks divide compute what a whole one computes.
use burn::module::Module;
use burn::nn::{LayerNorm, LayerNormConfig, Linear, LinearConfig};
use burn::optim::{GradientsParams, Optimizer, SgdConfig};
use burn::prelude::*;
use burn_float8::{Float8Config, Recipe};
use float8_shard::{Operation, ParallelPlan, ShardConfig, Sharded, TensorParallel, TensorStyle};
use ranks::{B, Inner, bits};

use super::world;

/// Tokens, and features of each side: four ranks have whole blocks of 128.
pub(super) const SIZE: usize = 512;

pub(super) fn random(seed: u64) -> Tensor<B, 2> {
    let device = Default::default();
    B::seed(&device, seed);
    Tensor::random([SIZE, SIZE], burn::tensor::Distribution::Normal(0.0, 1.0), &device)
}

/// A matrix divided over ranks along an axis.
pub(super) struct Divided {
    pub(super) axis: usize,
    pub(super) ranks: usize,
    pub(super) rank: usize,
}

impl Divided {
    pub(super) fn part<T: Backend>(&self, whole: Tensor<T, 2>) -> Tensor<T, 2> {
        let len = whole.dims()[self.axis] / self.ranks;
        whole.narrow(self.axis, self.rank * len, len)
    }
}

/// A linear with a name.
#[derive(Module, Debug)]
pub(super) struct One<B: Backend> {
    pub(super) linear: Linear<B>,
}

/// A linear with this weight.
pub(super) fn one(recipe: Recipe, weight: Tensor<B, 2>) -> One<B> {
    let linear = LinearConfig::new(SIZE, SIZE).with_bias(false).init::<B>(&Default::default());
    let weight = linear.weight.map(|_| weight.detach().require_grad());
    Float8Config::new(recipe).apply(One { linear: Linear { weight, ..linear } }).unwrap().0
}

/// y, dx and dw of a linear without bias.
pub(super) fn read(One { linear }: &One<B>, x: Tensor<B, 2>, dy: Tensor<B, 2>) -> [Tensor<Inner, 2>; 3] {
    let x = x.detach().require_grad();
    let y = linear.forward(x.clone());
    let grads = (y.clone() * dy.detach()).sum().backward();
    [y.inner(), x.grad(&grads).unwrap(), linear.weight.val().grad(&grads).unwrap()]
}

/// With an identity matrix as one factor, a product shows the codes and scales of the other one.
pub fn codes_are_those_of_a_cast_of_the_whole() {
    let comm = world();
    let device = Default::default();
    let (ranks, rank) = (comm.world_size(), comm.rank());
    let along = |axis| Divided { axis, ranks, rank };
    let eye = || Tensor::<B, 2>::eye(SIZE, &device);
    for recipe in Recipe::ALL {
        let linear = |weight| one(recipe, weight);
        for (x, w, dy) in [(eye(), random(1), eye()), (random(2), eye(), eye()), (eye(), eye(), random(3))] {
            let [y, dx, dw] = read(&linear(w.clone()), x.clone(), dy.clone());
            for (style, of_x, of_w, of_y) in [
                (TensorStyle::Colwise, along(0), along(1), along(1)),
                (TensorStyle::Rowwise, along(1), along(0), along(0)),
            ] {
                let plan: ParallelPlan = vec![("linear".into(), style)];
                let (part, _) = TensorParallel::apply(linear(w.clone()), &comm, &plan).unwrap();
                let found = read(&part, of_x.part(x.clone()), of_y.part(dy.clone())).map(bits);
                let expected = [of_y.part(y.clone()), of_x.part(dx.clone()), of_w.part(dw.clone())].map(bits);
                for (i, name) in ["y", "dx", "dw"].into_iter().enumerate() {
                    assert!(found[i] == expected[i], "{recipe} {style:?}: {name} on rank {rank}");
                }
            }
        }
    }
}

/// A norm, and a multi-layer perceptron.
#[derive(Module, Debug)]
struct Block<B: Backend> {
    norm: LayerNorm<B>,
    up: Linear<B>,
    down: Linear<B>,
}

impl<B: Backend> Block<B> {
    fn forward(&self, x: Tensor<B, 3>) -> Tensor<B, 3> {
        let h = burn::tensor::activation::silu(self.up.forward(self.norm.forward(x.clone())));
        x + self.down.forward(h)
    }
}

/// Losses and parameters of a few steps: two sequences, whose tokens are divided without regard to them.
pub fn a_block_trains_as_on_one_rank() {
    let comm = world();
    let device = Default::default();
    let (ranks, rank) = (comm.world_size(), comm.rank());
    let plan: ParallelPlan = vec![
        ("norm".into(), TensorStyle::Sequence),
        ("up".into(), TensorStyle::Colwise),
        ("down".into(), TensorStyle::Rowwise),
    ];
    for recipe in Recipe::ALL {
        let block = || {
            B::seed(&device, 5);
            let block = Block::<B> {
                norm: LayerNormConfig::new(128).init(&device),
                up: LinearConfig::new(128, SIZE).init(&device),
                down: LinearConfig::new(SIZE, 128).init(&device),
            };
            Float8Config::new(recipe).apply(block).unwrap().0
        };
        let mut whole = block();
        let (mut part, parallel) = TensorParallel::apply(block(), &comm, &plan).unwrap();
        let mut optimizers = [SgdConfig::new().init(), SgdConfig::new().init()];
        for step in 0..4 {
            B::seed(&device, 100 + step);
            let x = Tensor::<B, 3>::random([2, SIZE, 128], burn::tensor::Distribution::Normal(0.0, 1.0), &device);
            let loss = whole.forward(x.clone()).powi_scalar(2).sum() / (2 * SIZE) as f32;
            let expected = loss.clone().into_scalar();
            let grads = GradientsParams::from_grads(loss.backward(), &whole);
            whole = optimizers[0].step(0.1, whole, grads);

            let tokens = 2 * SIZE / ranks;
            let own = x.reshape([2 * SIZE, 128]).narrow(0, rank * tokens, tokens).reshape([2, SIZE / ranks, 128]);
            let loss = part.forward(own).powi_scalar(2).sum() / (2 * SIZE) as f32;
            let sum = comm.all_reduce_sum("loss", vec![loss.clone().into_scalar()]).unwrap().wait().unwrap()[0];
            // Sums over ranks have another order, which moves codes of later steps.
            let bound = if step == 0 { 1e-6 } else { 1e-4 };
            assert!((sum - expected).abs() < bound * expected, "{recipe}, step {step}: {sum}, not {expected}");
            let mut grads = GradientsParams::from_grads(loss.backward(), &part);
            parallel.reduce_gradients(&part, &mut grads).unwrap();
            part = optimizers[1].step(0.1, part, grads);
            if step > 0 {
                continue;
            }
            let near = |name: &str, found: Tensor<B, 1>, expected: Tensor<B, 1>| {
                let far = (found - expected).abs().max().into_scalar();
                assert!(far < 1e-5, "{recipe}: {name} differs by {far}");
            };
            let columns = SIZE / ranks;
            near("norm", part.norm.gamma.val(), whole.norm.gamma.val());
            near(
                "up",
                part.up.weight.val().flatten(0, 1),
                whole.up.weight.val().narrow(1, rank * columns, columns).flatten(0, 1),
            );
            near(
                "up.bias",
                part.up.bias.clone().unwrap().val(),
                whole.up.bias.clone().unwrap().val().narrow(0, rank * columns, columns),
            );
            near(
                "down",
                part.down.weight.val().flatten(0, 1),
                whole.down.weight.val().narrow(0, rank * columns, columns).flatten(0, 1),
            );
            near("down.bias", part.down.bias.clone().unwrap().val(), whole.down.bias.clone().unwrap().val());
        }
    }
}

/// Bytes that a step of a linear gathers. One gather of codes serves fprop and wgrad where both read the
/// same codes, and all linears that read x.
pub fn bytes_of_gathers() {
    let comm = world();
    let device = Default::default();
    let along = |axis| Divided { axis, ranks: comm.world_size(), rank: comm.rank() };
    let part = (SIZE * SIZE / comm.world_size()) as u64;
    // Bytes of x of a colwise linear, by element: codes of two orientations, or one and x in f32; scales.
    for (recipe, gathers, bytes) in [
        (Recipe::Tensorwise, 1, part),
        (Recipe::Delayed, 1, part),
        (Recipe::Rowwise, 2, 2 * part + 4 * part / SIZE as u64),
        (Recipe::Blockwise, 2, 2 * (part + part / 32)),
        (Recipe::Mxfp8, 2, 2 * (part + part / 32)),
        (Recipe::Mxfp8WgradWithHp, 2, part + part / 32 + 4 * part),
        (Recipe::RowwiseWithGwHp, 2, part + 4 * part / SIZE as u64 + 4 * part),
    ] {
        let linear = || {
            let linear = LinearConfig::new(SIZE, SIZE).with_bias(false).init::<B>(&device);
            let weight = linear.weight.map(|_| random(5).detach().require_grad());
            Linear { weight, ..linear }
        };
        let two = Float8Config::new(recipe).apply(vec![linear(), linear()]).unwrap().0;
        let plan: ParallelPlan = vec![("*".into(), TensorStyle::Colwise)];
        let (two, _) = TensorParallel::apply(two, &comm, &plan).unwrap();
        let x = along(0).part(random(4)).require_grad();
        let before = comm.traffic();
        let y = two[0].forward(x.clone()) + two[1].forward(x);
        y.sum().backward();
        let found = comm.traffic().since(&before).operation(Operation::AllGather);
        // Late gathers, of backward, are by linear.
        let late = gathers - 1;
        let of_first = if late == 0 { bytes } else { part + scales_of_rows(recipe, part) };
        assert_eq!((found.calls, found.sent), (1 + 2 * late, of_first + 2 * (bytes - of_first)), "{recipe}");
    }
}

/// Bytes of the scales of x's rows on this rank.
fn scales_of_rows(recipe: Recipe, part: u64) -> u64 {
    match recipe {
        Recipe::Blockwise | Recipe::Mxfp8 | Recipe::Mxfp8WgradWithHp => part / 32,
        _ => 4 * part / SIZE as u64,
    }
}

/// A plan that names no module or another kind, parts that are no whole blocks, and a second division.
pub fn plans_that_are_refused() {
    let comm = world();
    let device = Default::default();
    let block = |width: usize| {
        B::seed(&device, 6);
        let block = Block::<B> {
            norm: LayerNormConfig::new(128).init(&device),
            up: LinearConfig::new(128, width).init(&device),
            down: LinearConfig::new(width, 128).init(&device),
        };
        Float8Config::new(Recipe::Mxfp8).apply(block).unwrap().0
    };
    let plan = |name: &str, style| -> ParallelPlan { vec![(name.into(), style)] };
    let refused = |plan, width, words: &str| {
        let error = TensorParallel::apply(block(width), &comm, &plan).unwrap_err().error.to_string();
        assert!(error.contains(words), "{error}");
    };
    refused(plan("gate", TensorStyle::Colwise), 512, "plan: \"gate\" matches none");
    refused(plan("norm", TensorStyle::Rowwise), 512, "norm is no linear and no embedding, so ranks cannot divide it");
    refused(
        plan("up", TensorStyle::Colwise),
        192,
        "up has 192 columns, which 2 ranks do not divide into multiples of 128",
    );
    let (once, _) = TensorParallel::apply(block(512), &comm, &plan("up", TensorStyle::Colwise)).unwrap();
    let error = Sharded::apply(once, &comm, ShardConfig::default()).unwrap_err().error.to_string();
    assert!(error.contains("up is divided by TensorParallel"), "{error}");
}
