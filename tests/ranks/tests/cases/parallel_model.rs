//! Decoders whose linears, embedding and output layer ranks divide, in replicas of shards of parts.
use burn_float8::{Float8Config, Recipe};
use float8_shard::{ParallelPlan, Sharded, TensorParallel, TensorStyle};
use ranks::{Batches, Training, check_gradients, divisible, gradients};

use super::compare::{in_turns, train_as_one_rank};
use super::parallel::{mesh, one, random};
use super::world;

/// Two passes of eight sequences. Ranks of a tensor group read the same ones.
const BATCHES: Batches = Batches { sequences: 8, ..Batches::of_one(2) };

/// Replicas, shards and parts of four ranks.
const MESHES: [[usize; 3]; 3] = [[1, 1, 4], [1, 2, 2], [2, 1, 2]];

/// Each rank has its rows and columns of the gradients of all batches.
pub fn has_the_gradients_of_one_rank() {
    let in_recipes = Recipe::ALL.map(|recipe| ("llama3-debug", Some(recipe)));
    let runs: Vec<_> = [("llama3-debug", None), ("qwen3-debug", None)].into_iter().chain(in_recipes).collect();
    // Loss and gradients.
    let whole = in_turns(runs.len(), |i| {
        let one = Training::new(divisible(runs[i].0, runs[i].1), BATCHES);
        let (loss, grads) = one.gradients();
        [loss].into_iter().chain(gradients(&one.model, grads).into_values().flatten()).collect()
    });
    for ((preset, recipe), whole) in runs.into_iter().zip(whole) {
        // Another case has the codes of each recipe.
        let meshes = if recipe.is_some() { &MESHES[1..2] } else { &MESHES };
        for parts in meshes {
            let training = Training::sharded(divisible(preset, recipe), &world(), mesh(*parts), BATCHES);
            let (loss, grads) = training.gradients();
            let what = format!("{preset} {recipe:?} {parts:?}");
            // Sums in another order move FP8 codes to their neighbours.
            let (bound, of_gradients) = if recipe.is_some() { (1e-5, 0.15) } else { (1e-6, 1e-5) };
            assert!((loss - whole[0]).abs() <= bound * whole[0], "{what}: {loss}, not {}", whole[0]);
            check_gradients(&training.model, grads, &whole[1..], of_gradients, &what);
        }
    }
}

pub fn trains_as_on_one_rank() {
    let some = [Recipe::Tensorwise, Recipe::RowwiseWithGwHp, Recipe::Mxfp8];
    train_as_one_rank(|recipe| divisible("llama3-debug", recipe), &some, BATCHES, &MESHES.map(mesh));
}

/// Parts of other ranks than the mesh's, and a mesh without parts.
pub fn of_other_parts_is_refused() {
    let comm = world();
    let one = || one(Float8Config::tensorwise(), random(4));
    let refused = |model, words: &str| {
        let error = Sharded::apply(model, &comm, mesh([1, 2, 2])).unwrap_err().error.to_string();
        assert!(error.contains(words), "{error}");
    };
    let plan: ParallelPlan = vec![("linear".into(), TensorStyle::Colwise)];
    let (parts, _) = TensorParallel::apply(one(), &comm, &plan).unwrap();
    refused(parts, "linear is divided by TensorParallel over 4 ranks, where `tensor` is 2");
    refused(one(), "the model has no linear that TensorParallel divides, where `tensor` is 2");
}
