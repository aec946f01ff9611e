//! Comparison of training over ranks with training on one rank.
use burn_float8::Recipe;
use float8_shard::ShardConfig;
use ranks::{Batches, Model, Training, check_gradients, gradients};

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

/// Training of a decoder in high precision or in a recipe, on several meshes.
pub struct Run<M> {
    pub build: fn(Option<Recipe>) -> M,
    pub recipe: Option<Recipe>,
    pub steps: usize,
    pub meshes: Vec<ShardConfig>,
}

/// Gradients of a first step are one rank's to 1e-5 of a parameter's norm, or to `of_codes` in FP8. So are
/// losses: the first to 1e-5, later ones to 1e-6, or in FP8 to 1e-3. Sums in another order move codes to
/// their neighbours. One rank's losses differ by up to 5e-4 with its sequences in another order.
pub fn train_as_one_rank<M: Model>(runs: &[Run<M>], batches: Batches, of_codes: f64) {
    let one = in_turns(runs.len(), |i| {
        let mut one = Training::new((runs[i].build)(runs[i].recipe), batches);
        let whole = gradients(&one.model, one.gradients().1).into_values().flatten().collect();
        [one.losses(runs[i].steps), whole].concat()
    });
    for (Run { build, recipe, steps, meshes }, one) in runs.iter().zip(one) {
        let (expected, whole) = one.split_at(*steps);
        for mesh in meshes {
            let what = format!("{recipe:?} {mesh:?}");
            let mut several = Training::sharded(build(*recipe), &world(), *mesh, batches);
            let bound = if recipe.is_some() { [1e-5, 1e-3, of_codes] } else { [1e-6, 1e-6, 1e-5] };
            let (_, grads) = several.gradients();
            check_gradients(&several.model, grads, whole, bound[2], &what);
            let losses = several.losses(*steps);
            let far: Vec<_> =
                losses.iter().zip(expected).map(|(loss, one)| f64::from((loss - one).abs() / one)).collect();
            let is_near = far[0] <= bound[0] && far.iter().all(|far| *far <= bound[1]);
            assert!(is_near, "{what}: {losses:?}, not {expected:?}");
        }
    }
}
