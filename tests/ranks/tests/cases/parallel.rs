//! Linears that ranks divide compute what a whole one computes.
use burn::module::Module;
use burn::nn::{Initializer, LayerNorm, LayerNormConfig, Linear, LinearConfig};
use burn::optim::GradientsParams;
use burn::prelude::*;
use burn_float8::{Float8Config, GroupedLinear, Recipe};
use float8_shard::{Operation, ParallelPlan, ShardConfig, Sharded, TensorParallel, TensorStyle};
use ranks::{B, Inner, bits, check_gradients, gradients};

use super::world;

/// Tokens, and features of each side: four ranks have whole blocks of 128.
pub(super) const SIZE: usize = 512;

/// Replicas, shards and parts.
pub(super) fn mesh([replicate, shard, tensor]: [usize; 3]) -> ShardConfig {
    ShardConfig { replicate, shard: shard as i64, tensor, ..ShardConfig::default() }
}

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

/// A linear with this weight, in high precision.
fn plain(weight: Tensor<B, 2>) -> Linear<B> {
    let linear = LinearConfig::new(SIZE, SIZE).with_bias(false).init::<B>(&Default::default());
    let weight = linear.weight.map(|_| weight.detach().require_grad());
    Linear { weight, ..linear }
}

/// A configured linear with this weight.
pub(super) fn one(config: Float8Config, weight: Tensor<B, 2>) -> One<B> {
    config.apply(One { linear: plain(weight) }).unwrap().0
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
    let (comm, eye) = (world(), || Tensor::<B, 2>::eye(SIZE, &Default::default()));
    let ranks = comm.world_size();
    for recipe in Recipe::ALL {
        let one = |weight| one(Float8Config::new(recipe), weight);
        for (x, w, dy) in [(eye(), random(1), eye()), (random(2), eye(), eye()), (eye(), eye(), random(3))] {
            let [y, dx, dw] = read(&one(w.clone()), x.clone(), dy.clone());
            for (style, axes) in [(TensorStyle::Colwise, [0, 1]), (TensorStyle::Rowwise, [1, 0])] {
                for parts in [[1, 1, ranks], [1, 2, ranks / 2]].into_iter().filter(|parts| parts[2] > 1) {
                    let plan: ParallelPlan = vec![("linear".into(), style)];
                    let (tensor, config) = (parts[2], mesh(parts));
                    let tensor_ranks = config.tensor_ranks(&comm).unwrap();
                    let mut part = TensorParallel::apply(one(w.clone()), &tensor_ranks, &plan).unwrap().0;
                    let mut sharded = None;
                    if parts[1] > 1 {
                        let (shard, handle) = Sharded::apply(part, &comm, config).unwrap();
                        (part, sharded) = (shard, Some(handle));
                    }
                    let parameter = Sharded::parameters::<B, _>(&part).remove(0);
                    assert_eq!(parameter.shape, [SIZE, SIZE]);
                    let [rows, cols] = [parameter.rows, parameter.cols].map(|of| of.unwrap_or([0, SIZE]));
                    // Ranks of other batches read the same one here, and their gradients are summed.
                    let dw = dw.clone().slice([rows[0]..rows[1], cols[0]..cols[1]]) * parts[1] as f64;
                    let [of_x, of_y] = axes.map(|axis| Divided { axis, ranks: tensor, rank: comm.rank() % tensor });
                    let read = || read(&part, of_x.part(x.clone()), of_y.part(dy.clone())).map(bits);
                    let (found, expected) = (read(), [of_y.part(y.clone()), of_x.part(dx.clone()), dw].map(bits));
                    let what = format!("{recipe} {style:?} {parts:?} on rank {}", comm.rank());
                    for (i, name) in ["y", "dx", "dw"].into_iter().enumerate() {
                        assert!(found[i] == expected[i], "{what}: {name}");
                    }
                    // With the amaxes of all weights in one all-reduce; the gradient comes later.
                    let Some(sharded) = sharded else { continue };
                    sharded.precompute_scales(&part);
                    assert!(read()[..2] == expected[..2], "{what}: precomputed");
                    sharded.reduce_gradients(&part, &mut GradientsParams::new()).unwrap();
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
    /// Mean square of y of all tokens, as a sum over ranks.
    fn loss(&self, x: Tensor<B, 3>) -> Tensor<B, 1> {
        let h = burn::tensor::activation::silu(self.up.forward(self.norm.forward(x.clone())));
        (x + self.down.forward(h)).powi_scalar(2).sum() / (2 * SIZE) as f32
    }
}

fn block(recipe: Recipe, width: usize) -> Block<B> {
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

/// Calls and bytes that a step of two linears exchanges: gathers of x or dy, sums of y or dx, and amaxes.
/// One gather of codes serves two GEMMs where both read the same codes, and a gather of x serves both
/// linears.
pub fn bytes_of_tokens() {
    let comm = world();
    let ranks = comm.world_size();
    let (part, lines) = ((SIZE * SIZE / ranks) as u64, 4 * SIZE as u64);
    for recipe in Recipe::ALL {
        // Bytes that a rank gives of x or dy: codes or values of the first gather, and of wgrad's own.
        let (of_rows, of_blocks) = (part + lines / ranks as u64, part + part / 32);
        let [first, late] = match recipe {
            Recipe::Tensorwise | Recipe::Delayed => [part, 0],
            Recipe::Rowwise => [of_rows, part],
            Recipe::RowwiseWithGwHp => [of_rows, 4 * part],
            Recipe::Blockwise | Recipe::Mxfp8 => [of_blocks; 2],
            Recipe::Mxfp8WgradWithHp => [of_blocks, 4 * part],
        };
        let late_calls = u64::from(late > 0);
        for (style, axis) in [(TensorStyle::Colwise, 0), (TensorStyle::Rowwise, 1)] {
            let two = Float8Config::new(recipe).apply([5, 6].map(|seed| plain(random(seed))).to_vec()).unwrap().0;
            let two = TensorParallel::apply(two, &comm, &vec![("*".into(), style)]).unwrap().0;
            let (two, sharded) = Sharded::apply(two, &comm, mesh([1, 1, ranks])).unwrap();
            let mut before = comm.traffic();
            sharded.precompute_scales(&two);
            let of_weights = comm.traffic().since(&before).operation(Operation::AllReduceMaxBits).calls;
            before = comm.traffic();
            let x = Divided { axis, ranks, rank: comm.rank() }.part(random(4)).require_grad();
            let y = two[0].forward(x.clone()) + two[1].forward(x);
            let mut grads = GradientsParams::from_grads(y.sum().backward(), &two);
            sharded.reduce_gradients(&two, &mut grads).unwrap();
            let traffic = comm.traffic().since(&before);
            let found = |of| [traffic.operation(of).calls, traffic.operation(of).sent];
            // x once, and dy for each linear; in histories also the amaxes of a step, of x, w and dy.
            let is_colwise = style == TensorStyle::Colwise;
            let amaxes = match recipe {
                Recipe::Tensorwise => [3, 3 * 4],
                Recipe::Delayed => [4, 3 * 4 + 2 * 3 * 4],
                Recipe::Rowwise => [3, 3 * lines],
                Recipe::RowwiseWithGwHp if is_colwise => [2, 2 * lines],
                Recipe::RowwiseWithGwHp => [1, lines],
                _ => [0, 0],
            };
            let gathers = match is_colwise {
                true => [1 + 2 * late_calls, first + 2 * late],
                false => [2 + 2 * late_calls, 2 * (first + late)],
            };
            let what = format!("{recipe} {style:?}");
            assert_eq!(found(Operation::AllGather), gathers, "{what}");
            // dx or y of each linear, in its dtype.
            assert_eq!(found(Operation::ReduceScatterSum), [2, 2 * SIZE as u64 * lines], "{what}");
            assert_eq!(found(Operation::AllReduceMaxBits), amaxes, "{what}");
            assert_eq!(of_weights, u64::from(amaxes[0] > 0), "{what}: one for all weights");
        }
    }
}

/// A plan that names no module or another kind, parts that are no whole blocks, and a second division.
pub fn plans_that_are_refused() {
    let (comm, block) = (world(), |width| block(Recipe::Mxfp8, width));
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
    let grouped = GroupedLinear::<B>::new(2, 128, 128, &Initializer::Zeros, &Default::default());
    let error = TensorParallel::apply(vec![grouped], &comm, &plan("0", TensorStyle::Colwise)).unwrap_err().error;
    assert!(error.to_string().contains("0 is no linear and no embedding"), "{error}");
    let (once, _) = TensorParallel::apply(block(512), &comm, &plan("up", TensorStyle::Colwise)).unwrap();
    let error = Sharded::apply(once, &comm, ShardConfig::default()).unwrap_err().error.to_string();
    assert!(error.contains("up is divided by TensorParallel"), "{error}");
}
