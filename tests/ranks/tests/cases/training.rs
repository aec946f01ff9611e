//! Exchange of gradients, and of whole parameters.
use burn::optim::GradientsParams;
use burn_float8::Recipe;
use float8_shard::{Operation, ReduceDtype, ShardConfig, Sharded};
use ranks::{B, Batches, Model, Net, Training, batch, gradients, mixture, model, net, parameters, tied_model};

use super::compare::STEPS;
use super::{ON_DEVICE, world};

/// Gradients rounded once on each rank halve the bytes and hardly change the loss.
pub fn gradients_in_bf16() {
    let comm = world();
    let ranks = comm.world_size();
    let train = |reduce_dtype| {
        let config = ShardConfig { reduce_dtype, replicate: ranks / 2, ..ShardConfig::default() };
        let mut training = Training::sharded(model(Recipe::Tensorwise), &comm, config, Batches::of_one(ranks));
        let before = comm.traffic();
        (training.losses(STEPS), comm.traffic().since(&before))
    };
    let [(exact, sums), (rounded, halves)] = [ReduceDtype::F32, ReduceDtype::Bf16].map(train);
    assert_eq!(exact[0], rounded[0], "the first loss comes before any gradient");
    assert_ne!(exact.last(), rounded.last(), "nothing was rounded");
    for (step, (exact, rounded)) in exact.iter().zip(&rounded).enumerate() {
        assert!((exact - rounded).abs() <= 1e-2 * exact, "step {step}: {exact} and {rounded}");
    }
    let [scattered, exchanged] =
        [(sums, Operation::ReduceScatterSum), (halves, Operation::AllToAll)].map(|(traffic, of)| traffic.operation(of));
    assert_eq!((exchanged.calls, 2 * exchanged.sent), (scattered.calls, scattered.sent));
    assert!(exchanged.sent > 0);
}

/// Gradients of the shards.
fn shards(model: &Net<B>, grads: GradientsParams) -> Vec<Vec<f32>> {
    let mut all = gradients(model, grads);
    let parameters = Sharded::parameters::<B, _>(model).into_iter().filter(|parameter| parameter.is_shard);
    parameters.map(|parameter| all.remove(&parameter.name).unwrap()).collect()
}

/// Gradients of a step are the ones without a step, bit for bit. Backward starts all
/// reduce-scatters and leaves the last in flight.
pub fn reduce_scatters_overlap() {
    let comm = world();
    for reduce_dtype in [ReduceDtype::F32, ReduceDtype::Bf16] {
        if ON_DEVICE && reduce_dtype == ReduceDtype::Bf16 {
            continue;
        }
        let config = ShardConfig { reduce_dtype, ..ShardConfig::default() };
        let (model, sharded) = Sharded::apply(tied_model(Recipe::Tensorwise), &comm, config).unwrap();
        let pass = |number: usize| {
            let loss = model.loss(batch(number * comm.world_size() + comm.rank(), &Default::default()));
            GradientsParams::from_grads(loss.backward(), &model)
        };
        let expected = [0, 1].map(|number| shards(&model, pass(number)));
        // Each of two passes of a step.
        sharded.precompute_scales(&model);
        for (number, expected) in expected.iter().enumerate() {
            let mut grads = pass(number);
            // These are the gradients of no part of the model, so the sums stay for later.
            sharded.wait_for_gradients(&model, &mut GradientsParams::new()).unwrap();
            sharded.wait_for_gradients(&model, &mut grads).unwrap();
            assert_eq!(shards(&model, grads), *expected, "{reduce_dtype:?}");
        }
        // The next step forgets a step without an end.
        assert!(shards(&model, pass(1)).iter().flatten().all(|x| *x == 0.0), "backward has waited");
        sharded.precompute_scales(&model);
        let mut grads = pass(0);
        sharded.reduce_gradients(&model, &mut grads).unwrap();
        assert_eq!(shards(&model, grads), expected[0], "{reduce_dtype:?}");
    }
}

/// Accumulated gradients are exchanged with the next ones, with one call per weight.
pub fn gradients_that_wait() {
    let comm = world();
    let (model, sharded) = Sharded::apply(model(Recipe::Tensorwise), &comm, ShardConfig::default()).unwrap();
    let gradients = |number, requires_sync| {
        sharded.set_requires_gradient_sync(requires_sync);
        let before = comm.traffic();
        let loss = model.loss(batch(number * comm.world_size() + comm.rank(), &Default::default()));
        let grads = GradientsParams::from_grads(loss.backward(), &model);
        (shards(&model, grads), comm.traffic().since(&before).operation(Operation::ReduceScatterSum).calls)
    };
    let [(first, calls), (second, _)] = [0, 1].map(|number| gradients(number, true));
    assert_eq!(calls, first.len() as u64);
    let (none, no_calls) = gradients(0, false);
    assert!(no_calls == 0 && none.iter().flatten().all(|x| *x == 0.0));
    let (both, calls_of_both) = gradients(1, true);
    assert_eq!(calls_of_both, calls);
    assert_ne!(both, first);
    for ((both, first), second) in both.iter().zip(&first).zip(&second) {
        let largest = first.iter().chain(second).fold(0_f32, |max, x| max.max(x.abs()));
        let near = |((both, first), second): ((&f32, &f32), &f32)| (both - (first + second)).abs() <= 1e-6 * largest;
        assert!(both.iter().zip(first).zip(second).all(near));
    }
    assert_eq!(gradients(0, true).0, first, "nothing waits any more");
}

/// Whole parameters load into shards and experts of ranks, and gathering returns them.
pub fn whole_parameters_load() {
    loads(net, ShardConfig::default());
    loads(mixture, super::experts::config());
}

fn loads<M: Model>(build: fn(Option<Recipe>) -> M, config: ShardConfig) {
    let mut trained = Training::new(build(None), Batches::of_one(1));
    trained.step();
    let (new, _) = Sharded::apply(build(Some(Recipe::Tensorwise)), &world(), config).unwrap();
    let loaded = new.load_record(trained.model.clone().into_record());
    assert!(parameters(&loaded) == parameters(&trained.model));
}
