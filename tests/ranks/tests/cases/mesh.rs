//! Replicas of shards: all meshes of two and of four ranks train as one rank does.
use burn_float8::Recipe;
use float8_shard::{Operation, Reshard, ShardConfig, Sharded};
use ranks::{
    B, Batches, Model, Training, check_gradients, gradients, llama, mixture, model, net, parameters, tied_model,
};

use super::compare::{STEPS, in_turns, recipes};
use super::world;

/// Configurations of all meshes.
fn meshes() -> [ShardConfig; 3] {
    let ranks = world().world_size();
    [1, ranks / 2, ranks].map(|replicate| ShardConfig { replicate, ..ShardConfig::default() })
}

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
/// for bit.
fn is_one_rank<M: Model>(build: fn(Option<Recipe>) -> M, recipes: &[Recipe]) {
    let batches = Batches { in_pairs: true, ..Batches::of_one(world().world_size()) };
    let end = |mut training: Training<M>| {
        let losses = training.losses(STEPS);
        [losses, parameters(&training.model)].concat()
    };
    let one = in_turns(recipes.len(), |i| end(Training::new(build(Some(recipes[i])), batches)));
    let [shards, mesh, replicas] = meshes();
    let let_go = ShardConfig { reshard: Reshard::AfterForward, ..shards };
    for (recipe, one) in recipes.iter().zip(one) {
        for config in [shards, let_go, mesh, replicas] {
            let found = end(Training::sharded(build(Some(*recipe)), &world(), config, batches));
            assert!(found == one, "{recipe} {config:?}: {:?} and {:?}", &found[..STEPS], &one[..STEPS]);
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

/// Gradients of one rank, and bytes of each collective.
pub fn has_the_gradients_of_one_rank() {
    have_the_gradients_of(net);
    have_the_gradients_of(llama);
    have_the_gradients_of(mixture);
}

/// Each rank has its rows of the gradient of all micro-batches, and moves the bytes that the mesh
/// needs.
fn have_the_gradients_of<M: Model>(build: fn(Option<Recipe>) -> M) {
    let (comm, batches) = (world(), Batches::of_one(world().world_size()));
    let one = Training::new(build(None), batches);
    let whole: Vec<f32> = gradients(&one.model, one.gradients().1).into_values().flatten().collect();
    for config in meshes() {
        let training = Training::sharded(build(None), &comm, config, batches);
        let before = comm.traffic();
        let (_, grads) = training.gradients();
        let traffic = comm.traffic().since(&before);
        // Bytes of the divided weights with their padding, and of the other parameters, in f32.
        let shards = comm.world_size() / config.replicate;
        let (mut weights, mut divided, mut others) = (0, 0, 0);
        for parameter in Sharded::parameters::<B, _>(&training.model) {
            let width: usize = parameter.shape[1..].iter().product();
            match parameter.is_shard {
                true => {
                    weights += 1;
                    divided += 4 * shards * parameter.shape[0].div_ceil(shards).next_multiple_of(16) * width;
                }
                false => others += 4 * parameter.shape[0] * width,
            }
        }
        let scattered = traffic.operation(Operation::ReduceScatterSum);
        assert_eq!([scattered.calls, scattered.sent], [weights, divided as u64], "{config:?}");
        // Shards between replicas, other parameters, and the loss.
        let between = if config.replicate > 1 { divided / shards } else { 0 };
        assert_eq!(traffic.operation(Operation::AllReduceSum).sent, (between + others + 4) as u64, "{config:?}");
        check_gradients(&training.model, grads, &whole, 1e-5, &format!("{config:?}"));
    }
}

pub fn of_another_size_is_refused() {
    let config = ShardConfig { replicate: 3, ..ShardConfig::default() };
    let error = Sharded::apply(model(Recipe::Tensorwise), &world(), config).unwrap_err().error.to_string();
    assert!(error.contains("parallelism.replicate = 3") && error.contains("do not make 4 ranks"), "{error}");
}
