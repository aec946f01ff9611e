//! Comparison of training over ranks with training on one rank.
use burn_float8::Recipe;
use float8_shard::ShardConfig;
use ranks::{Batches, Model, Training};

use super::world;

/// Steps of a run.
pub const STEPS: usize = 12;

/// These recipes, or all if `FLOAT8_ALL_RECIPES` is set.
pub fn recipes(some: &[Recipe]) -> Vec<Recipe> {
    if std::env::var_os("FLOAT8_ALL_RECIPES").is_some() { Recipe::ALL.to_vec() } else { some.to_vec() }
}

/// Results of `count` computations. Each rank makes some of them, and all ranks have all.
pub fn in_turns(count: usize, compute: impl Fn(usize) -> Vec<f32>) -> Vec<Vec<f32>> {
    let comm = world();
    let is_own = |i: usize| i % comm.world_size() == comm.rank();
    let own: Vec<_> = (0..count).map(|i| if is_own(i) { compute(i) } else { vec![] }).collect();
    let share = |own: Vec<f32>| {
        let bytes: Vec<u8> = own.into_iter().flat_map(f32::to_le_bytes).collect();
        let all = comm.all_gather_bytes("results", &bytes).unwrap().concat();
        all.as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect()
    };
    own.into_iter().map(share).collect()
}

/// Losses of meshes are one rank's, in high precision and in some recipes: the first to 1e-5, and later
/// ones in FP8 to 1e-3. Sums in another order move codes to their neighbours. One rank's losses differ by
/// up to 5e-4 with its sequences in another order.
pub fn train_as_one_rank<M: Model>(
    build: fn(Option<Recipe>) -> M,
    some: &[Recipe],
    batches: Batches,
    meshes: &[ShardConfig],
) {
    let runs: Vec<_> = [None].into_iter().chain(recipes(some).into_iter().map(Some)).collect();
    let one = in_turns(runs.len(), |i| Training::new(build(runs[i]), batches).losses(STEPS));
    for (recipe, one) in runs.into_iter().zip(one) {
        for mesh in meshes {
            let losses = Training::sharded(build(recipe), &world(), *mesh, batches).losses(STEPS);
            let far: Vec<_> = losses.iter().zip(&one).map(|(loss, one)| (loss - one).abs() / one).collect();
            let bound = if recipe.is_some() { [1e-5, 1e-3] } else { [1e-6; 2] };
            let is_near = far[0] <= bound[0] && far.iter().all(|far| *far <= bound[1]);
            assert!(is_near, "{recipe:?} {mesh:?}: {losses:?}, not {one:?}");
        }
    }
}
