//! A decoder with a mixture of experts, which ranks divide.
use burn_float8::{Float8Config, Recipe};
use float8_shard::{ShardConfig, Sharded};
use ranks::{B, Batches, Training, check_gradients, decoder, gradients, mixture};

use super::compare::train_as_one_rank;
use super::experts::config;
use super::world;

/// Ranks divide the sequences of one pass, as scales are of all tokens.
const BATCHES: Batches = Batches { sequences: 4, ..Batches::of_one(1) };

/// Loss, and gradients by name. With replicas, experts of each have the tokens of its ranks.
pub fn have_the_gradients_of_one_rank() {
    let comm = world();
    let runs = [None].into_iter().chain(Recipe::ALL.map(Some)).map(|recipe| (recipe, config()));
    let replicas = (comm.world_size() == 4).then(|| (None, ShardConfig { replicate: 2, ..config() }));
    for (recipe, config) in runs.chain(replicas) {
        let one = Training::new(mixture(recipe), BATCHES);
        let (expected, whole) = one.gradients();
        let whole: Vec<f32> = gradients(&one.model, whole).into_values().flatten().collect();
        let several = Training::sharded(mixture(recipe), &comm, config, BATCHES);
        let parameters = Sharded::parameters::<B, _>(&several.model);
        let divided = parameters.iter().filter(|parameter| parameter.shape.len() == 3 && parameter.rows.is_some());
        assert_eq!(divided.count(), 6);
        let (found, grads) = several.gradients();
        assert!((found - expected).abs() <= 1e-5 * expected, "{recipe:?}: {found}, not {expected}");
        check_gradients(&several.model, grads, &whole, 1e-5, &format!("{recipe:?} {config:?}"));
    }
}

pub fn train_as_on_one_rank() {
    let some = [Recipe::Tensorwise, Recipe::Delayed, Recipe::RowwiseWithGwHp, Recipe::Mxfp8];
    train_as_one_rank(mixture, &some, BATCHES, &[config()]);
}

/// Experts that end inside a square of scales, and a second division.
pub fn that_are_refused() {
    let refused = |model, words: &str| {
        let error = Sharded::apply(model, &world(), config()).unwrap_err().error.to_string();
        assert!(error.contains(words), "{error}");
    };
    let narrow = decoder("llama3-debug-moe", |dims| (dims.intermediate_size, dims.num_layers) = (96, 1));
    let squares = Float8Config::new(Recipe::Blockwise).apply(narrow).unwrap().0;
    refused(squares, "has experts of 128 x 96: 2 of them on a rank do not end where a block of 128 ends");
    refused(Sharded::apply(mixture(None), &world(), config()).unwrap().0, "is sharded already");
}
