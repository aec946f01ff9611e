//! GEMMs read the same operands from a sharded weight as from the whole one.
use burn::module::AutodiffModule;
use burn::nn::{Linear, LinearConfig};
use burn::optim::{GradientsParams, Optimizer, SgdConfig};
use burn::prelude::*;
use burn_float8::{Float8Config, Recipe, report};
use float8_shard::{Reshard, ShardConfig, Sharded};
use ranks::{B, Inner, bits};

use super::parallel::{self, eye, plain, random};
use super::world;

fn linear(k: usize, n: usize, recipe: Recipe) -> Linear<B> {
    let weight = random((k + n) as u64).slice([0..k, 0..n]) / 16;
    Float8Config::new(recipe).apply(plain(weight)).unwrap().0
}

/// Outputs y of an identity x and dx of an identity dy, which show the weight's codes and scales in
/// both orientations. Also dw of this rank's rows.
fn read(linear: &Linear<B>, k: usize, n: usize) -> [Vec<u32>; 3] {
    let products = parallel::read(linear, eye().slice([0..k, 0..k]), eye().slice([0..k, 0..n]));
    products.into_iter().map(bits).collect::<Vec<_>>().try_into().unwrap()
}

pub fn are_those_of_a_cast_of_the_whole() {
    let comm = world();
    for recipe in Recipe::ALL {
        // Divisible, not divisible, fewer rows than ranks, more than one block.
        for (k, n) in [(64, 32), (100, 48), (3, 16), (300, 130)] {
            let [kept, let_go] = [Reshard::AfterStep, Reshard::AfterForward].map(|reshard| {
                let whole = linear(k, n, recipe);
                let expected = read(&whole, k, n);
                let (shard, sharded) =
                    Sharded::apply(linear(k, n, recipe), &comm, ShardConfig { reshard, ..ShardConfig::default() })
                        .unwrap();
                let found = read(&shard, k, n);
                assert_eq!(found[..2], expected[..2], "{recipe} {k}x{n}");
                // Every rank has the same gradient, so the sum over two ranks is exactly twice it.
                let ranks = comm.world_size() as f32;
                let rows = Sharded::parameters::<B, _>(&shard)[0].rows.unwrap();
                let own = expected[2][rows[0] * n..rows[1] * n].iter().map(|bits| f32::from_bits(*bits) * ranks);
                let (own_bits, padding) = found[2].split_at((rows[1] - rows[0]) * n);
                if comm.world_size().is_power_of_two() {
                    assert_eq!(own_bits, own.map(f32::to_bits).collect::<Vec<_>>(), "{recipe} {k}x{n}");
                }
                assert!(padding.iter().all(|bits| *bits == 0), "{recipe} {k}x{n}");
                let report = report(&shard);
                let gathers = report.layers[0].sharding.clone().unwrap();
                assert_eq!((gathers.float8_gathers, gathers.high_precision_gathers), (2, 0), "{recipe} {k}x{n}");
                assert_eq!(sharded.summary().sharded, 1);
                report.layers[0].live_copies
            });
            // The other live copies are of x and dy.
            assert_eq!(kept - let_go, 2, "{recipe} {k}x{n}");
        }
    }
}

/// A NaN on one rank makes a scale of all ranks' amaxes NaN on every rank.
pub fn a_nan_in_the_rows_of_one_rank() {
    let comm = world();
    let (k, n) = (64, 32);
    for recipe in Recipe::ALL {
        let spoiled = || {
            let mut values = random(1).slice([0..k, 0..n]).into_data();
            values.as_mut_slice::<f32>().unwrap()[k * n - 5] = f32::NAN;
            Float8Config::new(recipe).apply(plain(Tensor::from_data(values, &Default::default()))).unwrap().0
        };
        // The payload of the NaN is not specified.
        let [y, dx, _] = read(&spoiled(), k, n).map(nans_alike);
        let (shard, _) = Sharded::apply(spoiled(), &comm, ShardConfig::default()).unwrap();
        let found = read(&shard, k, n).map(nans_alike);
        assert!(y.contains(&f32::NAN.to_bits()), "{recipe}");
        assert_eq!(found[..2], [y, dx], "{recipe}");
    }
}

fn nans_alike(bits: Vec<u32>) -> Vec<u32> {
    bits.into_iter().map(|bits| if f32::from_bits(bits).is_nan() { f32::NAN.to_bits() } else { bits }).collect()
}

/// A rank without rows of x takes part in all collectives, and adds its weight's amax to the history, also
/// if x needs no gradient.
pub fn an_empty_batch_on_some_ranks() {
    let (comm, device) = (world(), Default::default());
    for recipe in Recipe::ALL {
        let mut optimizers = [SgdConfig::new().init(), SgdConfig::new().init()];
        let mut whole = linear(64, 32, recipe);
        let (mut shard, sharded) = Sharded::apply(linear(64, 32, recipe), &comm, ShardConfig::default()).unwrap();
        B::seed(&device, 1);
        for step in 0..5 {
            let x = Tensor::<B, 2>::random([5, 64], burn::tensor::Distribution::Default, &device);
            let y = whole.forward(x.clone());
            let expected = bits(y.clone().inner());
            let grads = GradientsParams::from_grads(y.sum().backward(), &whole);
            whole = optimizers[0].step(0.5, whole, grads);
            sharded.precompute_scales(&shard);
            let rows = if comm.rank() == 0 { 5 } else { 0 };
            let y = shard.forward(x.slice([0..rows, 0..64]).detach().set_require_grad(step % 2 == 0));
            assert_eq!(bits(y.clone().inner()), expected[..rows * 32], "{recipe} step {step}");
            let mut grads = GradientsParams::from_grads(y.sum().backward(), &shard);
            sharded.reduce_gradients(&shard, &mut grads).unwrap();
            shard = optimizers[1].step(0.5, shard, grads);
        }
    }
}

/// Layers kept in high precision by the configuration, and models without FP8.
pub fn high_precision_is_gathered_too() {
    let comm = world();
    let device = Default::default();
    let plain = || {
        B::seed(&device, 3);
        LinearConfig::new(100, 48).init::<B>(&device)
    };
    let x = Tensor::<Inner, 2>::random([7, 100], burn::tensor::Distribution::Default, &device);
    burn_float8::set_default_config::<B>(&device, None).unwrap();
    let expected = bits(plain().valid().forward(x.clone()));
    for reshard in [Reshard::AfterStep, Reshard::AfterForward] {
        let (shard, _) = Sharded::apply(plain(), &comm, ShardConfig { reshard, ..ShardConfig::default() }).unwrap();
        let evaluated = shard.valid();
        for _ in 0..2 {
            assert_eq!(bits(evaluated.forward(x.clone())), expected);
        }
        let gathers = report(&shard).layers[0].sharding.clone().unwrap();
        let count = if reshard == Reshard::AfterStep { 1 } else { 2 };
        assert_eq!((gathers.float8_gathers, gathers.high_precision_gathers), (0, count));
    }
}
