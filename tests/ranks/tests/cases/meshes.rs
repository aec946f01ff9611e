//! Replicas of shards: all meshes of two and of four ranks train as one rank does.
use burn_float8::Recipe;
use float8_shard::{Reshard, ShardConfig};
use ranks::{Batches, Model, Training, llama, mixture, net, parameters, tied_model};

use super::compare::{STEPS, in_turns, recipes};
use super::world;

pub fn of_a_small_net() {
    is_one_rank(net, &Recipe::ALL);
}

pub fn of_llama() {
    is_one_rank(llama, &recipes(&[Recipe::Tensorwise, Recipe::Blockwise]));
}

pub fn of_a_mixture() {
    is_one_rank(mixture, &recipes(&[Recipe::Delayed, Recipe::Rowwise]));
}

/// A mesh has the losses and parameters of one rank that sums its micro-batches in the same order, bit
/// for bit, in high precision too.
fn is_one_rank<M: Model>(build: fn(Option<Recipe>) -> M, recipes: &[Recipe]) {
    let runs: Vec<_> = [None].into_iter().chain(recipes.iter().copied().map(Some)).collect();
    let batches = Batches { in_pairs: true, ..Batches::of_one(world().world_size()) };
    let end = |mut training: Training<M>| {
        let losses = training.losses(STEPS);
        [losses, parameters(&training.model)].concat()
    };
    let one = in_turns(runs.len(), |i| end(Training::new(build(runs[i]), batches)));
    let ranks = world().world_size();
    let [shards, mesh, replicas] =
        [1, ranks / 2, ranks].map(|replicate| ShardConfig { replicate, ..ShardConfig::default() });
    let let_go = ShardConfig { reshard: Reshard::AfterForward, ..shards };
    for (recipe, one) in runs.into_iter().zip(one) {
        for config in [shards, let_go, mesh, replicas] {
            let found = end(Training::sharded(build(recipe), &world(), config, batches));
            assert!(found == one, "{recipe:?} {config:?}: {:?} and {:?}", &found[..STEPS], &one[..STEPS]);
        }
    }
}

/// The embedding's and the output layer's gradients are each summed over ranks before they are
/// added, so the order of summation differs.
pub fn of_a_tied_output() {
    let batches = Batches::of_one(2);
    let train = |mut training: Training| training.losses(STEPS);
    let one = train(Training::new(tied_model(Recipe::Tensorwise), batches));
    for reshard in [Reshard::AfterStep, Reshard::AfterForward] {
        let config = ShardConfig { reshard, ..ShardConfig::default() };
        let two = train(Training::sharded(tied_model(Recipe::Tensorwise), &world(), config, batches));
        let is_near = |(one, two): (&f32, &f32)| (one - two).abs() <= 1e-3 * one;
        assert!(one[0] == two[0] && one.iter().zip(&two).all(is_near), "{one:?} and {two:?}");
    }
}
