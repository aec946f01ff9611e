//! Training on several ranks equals training on one with the same number of micro-batches.
use burn::module::{Module, ModuleVisitor, Param};
use burn::optim::GradientsParams;
use burn::tensor::Tensor;
use burn::tensor::backend::AutodiffBackend;
use burn_float8::Recipe;
use float8_shard::{Operation, ReduceDtype, Reshard, ShardConfig, Sharded};
use ranks::{B, Net, Training, batch, model, tied_model};

use super::world;

fn sharded(recipe: Recipe, reshard: Reshard) -> Training {
    Training::sharded(model(recipe), &world(), ShardConfig { reshard, ..ShardConfig::default() })
}

pub fn two_ranks_are_one_with_accumulation() {
    for recipe in Recipe::ALL {
        for reshard in [Reshard::AfterStep, Reshard::AfterForward] {
            let (mut one, mut two) = (Training::new(model(recipe), None), sharded(recipe, reshard));
            for step in 0..20 {
                let losses = [one.step(2), two.step(2)];
                assert_eq!(losses[0].to_bits(), losses[1].to_bits(), "{recipe} step {step}: {losses:?}");
            }
            for (one, two) in one.parameters().into_iter().zip(two.parameters()) {
                assert_eq!(one, two, "{recipe}: {}", one.0);
            }
        }
    }
}

/// The embedding's and the output layer's gradients are each summed over ranks before they are
/// added, so the order of summation differs.
pub fn a_tied_output() {
    for reshard in [Reshard::AfterStep, Reshard::AfterForward] {
        let (tied, config) = (tied_model(Recipe::Tensorwise), ShardConfig { reshard, ..ShardConfig::default() });
        let (mut one, mut two) = (Training::new(tied.clone(), None), Training::sharded(tied, &world(), config));
        for step in 0..20 {
            let [one, two] = [one.step(2), two.step(2)];
            let limit = if step == 0 { 0.0 } else { 1e-3 };
            assert!((one - two).abs() <= limit * one, "step {step}: {one} and {two}");
        }
    }
}

/// Gradients rounded once on each rank halve the bytes and hardly change the loss.
pub fn gradients_in_bf16() {
    let comm = world();
    let ranks = comm.world_size();
    let train = |reduce_dtype| {
        let config = ShardConfig { reduce_dtype, ..ShardConfig::default() };
        let mut training = Training::sharded(model(Recipe::Tensorwise), &comm, config);
        let before = comm.traffic();
        let losses: Vec<f32> = (0..50).map(|_| training.step(ranks)).collect();
        (losses, comm.traffic().since(&before))
    };
    let [(exact, sums), (rounded, halves)] = [ReduceDtype::F32, ReduceDtype::Bf16].map(train);
    assert_eq!(exact[0], rounded[0], "the first loss comes before any gradient");
    assert_ne!(exact[49], rounded[49], "nothing was rounded");
    for (step, (exact, rounded)) in exact.iter().zip(&rounded).enumerate() {
        assert!((exact - rounded).abs() <= 1e-2 * exact, "step {step}: {exact} and {rounded}");
    }
    let [scattered, exchanged] =
        [(sums, Operation::ReduceScatterSum), (halves, Operation::AllToAll)].map(|(traffic, of)| traffic.operation(of));
    assert_eq!((exchanged.calls, 2 * exchanged.sent), (scattered.calls, scattered.sent));
    assert!(exchanged.sent > 0);
}

struct Read(GradientsParams, Vec<Vec<f32>>);

impl ModuleVisitor<B> for Read {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
        if Sharded::is_shard(&param.val()) {
            let gradient = self.0.remove::<<B as AutodiffBackend>::InnerBackend, D>(param.id).expect("a gradient");
            self.1.push(gradient.into_data().to_vec().unwrap());
        }
    }
}

/// Gradients of the shards.
fn shards(model: &Net<B>, grads: GradientsParams) -> Vec<Vec<f32>> {
    let mut read = Read(grads, vec![]);
    model.visit(&mut read);
    read.1
}

/// Gradients of a step are the ones without a step, bit for bit. Backward starts all
/// reduce-scatters and leaves the last in flight.
pub fn reduce_scatters_overlap() {
    let comm = world();
    for reduce_dtype in [ReduceDtype::F32, ReduceDtype::Bf16] {
        if cfg!(feature = "staged") && reduce_dtype == ReduceDtype::Bf16 {
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

/// Whole parameters load into shards, and gathering returns them.
pub fn whole_parameters_load() {
    let mut trained = Training::new(model(Recipe::Tensorwise), None);
    trained.step(1);
    let (new, handle) = Sharded::apply(model(Recipe::Tensorwise), &world(), ShardConfig::default()).unwrap();
    let loaded = new.load_record(trained.model.clone().into_record());
    let loaded = Training::new(loaded, Some(handle));
    assert_eq!(loaded.parameters(), trained.parameters());
}
