//! Decoders whose linears, embedding and output layer, or experts, ranks divide.
use burn_float8::Recipe;
use float8_shard::{ShardConfig, Sharded};
use ranks::{B, Batches, divisible, mixture};

use super::compare::{Run, STEPS, recipes, train_as_one_rank};
use super::{experts, mesh, world};

/// In replicas of shards of parts, on two passes of eight sequences. Ranks of a tensor group read the same
/// ones.
pub fn linears_train_as_on_one_rank() {
    // Replicas, shards and parts of four ranks.
    let meshes = [[1, 1, 4], [1, 2, 2], [2, 1, 2]].map(mesh);
    let llama = |recipe| divisible("llama3-debug", recipe);
    let trained = recipes(&[Recipe::Tensorwise, Recipe::RowwiseWithGwHp, Recipe::Mxfp8]);
    let mut runs = vec![
        Run { build: llama, recipe: None, steps: STEPS, meshes: meshes.into() },
        Run { build: |recipe| divisible("qwen3-debug", recipe), recipe: None, steps: 1, meshes: meshes.into() },
    ];
    // Another case has the codes of each recipe.
    runs.extend(Recipe::ALL.map(|recipe| match trained.contains(&recipe) {
        true => Run { build: llama, recipe: Some(recipe), steps: STEPS, meshes: meshes.into() },
        false => Run { build: llama, recipe: Some(recipe), steps: 1, meshes: vec![meshes[1]] },
    }));
    train_as_one_rank(&runs, Batches { sequences: 8, ..Batches::of_one(2) }, 0.15);
}

/// Ranks divide the sequences of one pass, as scales are of all tokens. With replicas, experts of each have
/// the tokens of its ranks.
pub fn experts_train_as_on_one_rank() {
    let (comm, config) = (world(), experts::config());
    let divided = Sharded::apply(mixture(None), &comm, config).unwrap().0;
    let divided = Sharded::parameters::<B, _>(&divided);
    assert_eq!(divided.iter().filter(|place| place.shape.len() == 3 && place.rows.is_some()).count(), 6);
    let trained = recipes(&[Recipe::Tensorwise, Recipe::Delayed, Recipe::RowwiseWithGwHp, Recipe::Mxfp8]);
    let replicas = (comm.world_size() == 4).then_some(ShardConfig { replicate: 2, ..config });
    let mut runs: Vec<_> = Recipe::ALL
        .map(|recipe| {
            let steps = if trained.contains(&recipe) { STEPS } else { 1 };
            Run { build: mixture, recipe: Some(recipe), steps, meshes: vec![config] }
        })
        .into();
    let meshes = [config].into_iter().chain(replicas).collect();
    runs.push(Run { build: mixture, recipe: None, steps: STEPS, meshes });
    train_as_one_rank(&runs, Batches { sequences: 4, ..Batches::of_one(1) }, 1e-5);
}
