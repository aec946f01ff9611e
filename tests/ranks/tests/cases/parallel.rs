//! Linears that ranks divide compute what a whole one computes.
use burn::module::Module;
use burn::nn::{LayerNorm, LayerNormConfig, Linear, LinearConfig};
use burn::optim::GradientsParams;
use burn::prelude::*;
use burn_float8::{Float8Config, Recipe};
use float8_shard::{ParallelPlan, Sharded, TensorParallel, TensorStyle};
use ranks::{B, Inner, Part, bits, check_gradients, gradients};

use super::{mesh, world};

/// Tokens, and features of each side: four ranks have whole blocks of 128.
pub const SIZE: usize = 512;

/// Divisions of a linear, with the axes along which ranks divide x and y.
pub const STYLES: [(TensorStyle, [usize; 2]); 2] = [(TensorStyle::Colwise, [0, 1]), (TensorStyle::Rowwise, [1, 0])];

pub fn random(seed: u64) -> Tensor<B, 2> {
    let device = Default::default();
    B::seed(&device, seed);
    Tensor::random([SIZE, SIZE], burn::tensor::Distribution::Normal(0.0, 1.0), &device)
}

pub fn eye() -> Tensor<B, 2> {
    Tensor::eye(SIZE, &Default::default())
}

/// This rank's part of a matrix that each `ranks` consecutive ranks divide along an axis.
pub fn part<T: Backend>(whole: &Tensor<T, 2>, axis: usize, ranks: usize) -> Tensor<T, 2> {
    let len = whole.dims()[axis] / ranks;
    whole.clone().narrow(axis, world().rank() % ranks * len, len)
}

/// A linear with a name.
#[derive(Module, Debug)]
pub struct One<B: Backend> {
    pub linear: Linear<B>,
}

/// A linear with this weight and no bias, in high precision.
pub fn plain(weight: Tensor<B, 2>) -> Linear<B> {
    let [k, n] = weight.dims();
    let linear = LinearConfig::new(k, n).with_bias(false).init::<B>(&Default::default());
    let weight = linear.weight.map(|_| weight.detach().require_grad());
    Linear { weight, ..linear }
}

/// A configured linear with this weight.
pub fn one(config: Float8Config, weight: Tensor<B, 2>) -> One<B> {
    config.apply(One { linear: plain(weight) }).unwrap().0
}

/// y, dx and dw of a linear. A frozen weight has no gradient.
pub fn read(linear: &Linear<B>, x: Tensor<B, 2>, dy: Tensor<B, 2>) -> Vec<Tensor<Inner, 2>> {
    let x = x.detach().require_grad();
    let y = linear.forward(x.clone());
    let grads = (y.clone() * dy.detach()).sum().backward();
    let dw = linear.weight.val().grad(&grads);
    [y.inner(), x.grad(&grads).unwrap()].into_iter().chain(dw).collect()
}

/// With an identity matrix as one factor, a product shows the codes and scales of the other one.
pub fn codes_are_those_of_a_cast_of_the_whole() {
    let ranks = world().world_size();
    for recipe in Recipe::ALL {
        let one = |weight| one(Float8Config::new(recipe), weight);
        for (x, w, dy) in [(eye(), random(1), eye()), (random(2), eye(), eye()), (eye(), eye(), random(3))] {
            let whole = read(&one(w.clone()).linear, x.clone(), dy.clone());
            for (style, [of_x, of_y]) in STYLES {
                for parts in [[1, 1, ranks], [1, 2, ranks / 2]].into_iter().filter(|parts| parts[2] > 1) {
                    let plan: ParallelPlan = vec![("linear".into(), style)];
                    let Part { model, sharded, .. } = Part::new(one(w.clone()), &world(), mesh(parts), &plan);
                    let parameter = Sharded::parameters::<B, _>(&model).remove(0);
                    assert_eq!(parameter.shape, [SIZE, SIZE]);
                    let [rows, cols] = [parameter.rows, parameter.cols].map(|of| of.unwrap_or([0, SIZE]));
                    // Ranks of other batches read the same one here, and their gradients are summed.
                    let dw = whole[2].clone().slice([rows[0]..rows[1], cols[0]..cols[1]]) * parts[1] as f64;
                    let expected = [part(&whole[0], of_y, parts[2]), part(&whole[1], of_x, parts[2]), dw].map(bits);
                    let [x, dy] = [part(&x, of_x, parts[2]), part(&dy, of_y, parts[2])];
                    let read = || read(&model.linear, x.clone(), dy.clone()).into_iter().map(bits);
                    let what = format!("{recipe} {style:?} {parts:?} on rank {}", world().rank());
                    for ((name, found), expected) in ["y", "dx", "dw"].into_iter().zip(read()).zip(&expected) {
                        assert!(found == *expected, "{what}: {name}");
                    }
                    // With the amaxes of all weights in one all-reduce; the gradient comes later.
                    sharded.precompute_scales(&model);
                    assert!(read().take(2).eq(expected[..2].iter().cloned()), "{what}: precomputed");
                    sharded.reduce_gradients(&model, &mut GradientsParams::new()).unwrap();
                }
            }
        }
    }
}

/// A norm, and a multi-layer perceptron.
#[derive(Module, Debug)]
pub struct Block<B: Backend> {
    norm: LayerNorm<B>,
    up: Linear<B>,
    down: Linear<B>,
}

impl<B: Backend> Block<B> {
    /// Mean square of y of all tokens, as a sum over ranks.
    fn loss(&self, x: Tensor<B, 3>) -> Tensor<B, 1> {
        let h = burn::tensor::activation::silu(self.up.forward(self.norm.forward(x.clone())));
        (x + self.down.forward(h)).powi_scalar(2).sum() / (2 * SIZE) as f32
    }
}

pub fn block(recipe: Recipe, width: usize) -> Block<B> {
    let device = Default::default();
    B::seed(&device, 5);
    let block = Block::<B> {
        norm: LayerNormConfig::new(128).init(&device),
        up: LinearConfig::new(128, width).init(&device),
        down: LinearConfig::new(width, 128).init(&device),
    };
    Float8Config::new(recipe).apply(block).unwrap().0
}

/// Loss, and gradients of weights, of biases and of a norm: two sequences, whose tokens are divided without
/// regard to them.
pub fn a_block_has_the_gradients_of_one_rank() {
    let (comm, device) = (world(), Default::default());
    let plan: ParallelPlan = vec![
        ("norm".into(), TensorStyle::Sequence),
        ("up".into(), TensorStyle::Colwise),
        ("down".into(), TensorStyle::Rowwise),
    ];
    B::seed(&device, 100);
    let x = Tensor::<B, 3>::random([2, SIZE, 128], burn::tensor::Distribution::Normal(0.0, 1.0), &device);
    let tokens = 2 * SIZE / comm.world_size();
    let own = x.clone().reshape([2 * SIZE, 128]).narrow(0, comm.rank() * tokens, tokens).reshape([2, tokens / 2, 128]);
    for recipe in Recipe::ALL {
        let whole = block(recipe, SIZE);
        let loss = whole.loss(x.clone());
        let expected = loss.clone().into_scalar();
        let of_whole = gradients(&whole, GradientsParams::from_grads(loss.backward(), &whole));
        let of_whole: Vec<f32> = of_whole.into_values().flatten().collect();

        let (part, parallel) = TensorParallel::apply(block(recipe, SIZE), &comm, &plan).unwrap();
        let columns = SIZE / comm.world_size();
        let begin = comm.rank() * columns;
        let bias = Sharded::parameters::<B, _>(&part).into_iter().find(|place| place.name == "up.bias").unwrap();
        assert_eq!((bias.shape, bias.rows), (vec![SIZE], Some([begin, begin + columns])));
        let gathered = Sharded::gather(part.clone());
        for (found, expected) in [(&gathered.up, &whole.up), (&gathered.down, &whole.down)] {
            let read = |Linear { weight, bias, .. }: &Linear<B>| {
                (bits(weight.val().inner()), bits(bias.as_ref().unwrap().val().inner()))
            };
            assert!(read(found) == read(expected), "{recipe}: gathered on rank {}", comm.rank());
        }
        let loss = part.loss(own.clone());
        let sum = comm.all_reduce_sum("loss", vec![loss.clone().into_scalar()]).unwrap().wait().unwrap()[0];
        assert!((sum - expected).abs() < 1e-6 * expected, "{recipe}: {sum}, not {expected}");
        let mut grads = GradientsParams::from_grads(loss.backward(), &part);
        parallel.reduce_gradients(&part, &mut grads).unwrap();
        check_gradients(&part, grads, &of_whole, 1e-4, &recipe.to_string());
    }
}
