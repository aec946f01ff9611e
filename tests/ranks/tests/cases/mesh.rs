//! Replicas of shards: four ranks as 1 × 4, 2 × 2 and 4 × 1 train as one rank does.
use burn::optim::GradientsParams;
use burn_float8::Recipe;
use float8_shard::{Operation, ReduceDtype, Reshard, ShardConfig, Sharded};
use ranks::{B, Model, Training, gradients, llama, mixture, model, net};

use super::world;

/// Variable that selects all recipes.
const ALL: &str = "FLOAT8_ALL_RECIPES";
const RANKS: usize = 4;
const STEPS: usize = 12;

/// Replicas, and shards of each.
const MESHES: [[usize; 2]; 3] = [[1, 4], [2, 2], [4, 1]];

fn config([replicate, shard]: [usize; 2]) -> ShardConfig {
    ShardConfig { replicate, shard: shard as i64, ..ShardConfig::default() }
}

/// Losses of a few steps.
fn train<M: Model>(mut training: Training<M>) -> Vec<f32> {
    (0..STEPS).map(|_| training.step(RANKS)).collect()
}

pub fn of_a_small_net() {
    let some = [Recipe::Tensorwise, Recipe::Delayed, Recipe::RowwiseWithGwHp, Recipe::Mxfp8];
    is_one_rank(net, &some);
    // Gathered weights that are freed, and gradients in bf16, which wgpu lacks.
    let reduce_dtype = if cfg!(feature = "staged") { ReduceDtype::F32 } else { ReduceDtype::Bf16 };
    for recipe in some {
        let one = train(Training::new(model(recipe), None));
        let other = ShardConfig { reshard: Reshard::AfterForward, reduce_dtype, ..config([2, 2]) };
        let losses = train(Training::sharded(model(recipe), &world(), other));
        let is_near = |(loss, one): (&f32, &f32)| (loss - one).abs() <= 1e-2 * one;
        assert!(losses.iter().zip(&one).all(is_near), "{recipe}: {losses:?} and {one:?}");
    }
}

pub fn of_llama() {
    is_one_rank(llama, &[Recipe::Tensorwise, Recipe::Blockwise]);
}

pub fn of_a_mixture() {
    is_one_rank(mixture, &[Recipe::Delayed, Recipe::Rowwise]);
}

/// A mesh has the losses of one rank that sums its micro-batches in the same order, bit for bit.
fn is_one_rank<M: Model>(build: fn(Option<Recipe>) -> M, some: &[Recipe]) {
    let recipes = if std::env::var_os(ALL).is_some() { &Recipe::ALL[..] } else { some };
    for recipe in recipes {
        let one = train(Training::new(build(Some(*recipe)), None).in_pairs());
        for mesh in MESHES {
            let losses = train(Training::sharded(build(Some(*recipe)), &world(), config(mesh)));
            assert_eq!(losses, one, "{recipe} {mesh:?}");
        }
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
    let comm = world();
    let whole = build(None);
    let loss = (0..RANKS).map(|number| whole.loss_of(number)).reduce(|sum, loss| sum + loss);
    let expected = gradients(&whole, GradientsParams::from_grads(loss.unwrap().backward(), &whole));
    for mesh in MESHES {
        let (model, sharded) = Sharded::apply(build(None), &comm, config(mesh)).unwrap();
        let parameters = Sharded::parameters::<B, _>(&model);
        let before = comm.traffic();
        let mut grads = GradientsParams::from_grads(model.loss_of(comm.rank()).backward(), &model);
        let backward = comm.traffic();
        sharded.reduce_gradients(&model, &mut grads).unwrap();
        let traffic = [backward.since(&before), comm.traffic().since(&backward)];
        let [scattered, summed] =
            [Operation::ReduceScatterSum, Operation::AllReduceSum].map(|of| traffic[0].operation(of));
        // Bytes of the divided weights with their padding, and of the other parameters, in f32.
        let [replicate, shard] = mesh.map(|ranks| ranks as u64);
        let (mut weights, mut divided, mut others) = (0, 0, 0);
        for parameter in &parameters {
            let width: usize = parameter.shape[1..].iter().product();
            match parameter.rows.filter(|_| shard > 1) {
                Some(_) => {
                    weights += 1;
                    divided += 4 * shard * (parameter.shape[0].div_ceil(mesh[1]).next_multiple_of(16) * width) as u64;
                }
                None => others += 4 * (parameter.shape[0] * width) as u64,
            }
        }
        assert_eq!([scattered.calls, scattered.sent], [weights, divided], "{mesh:?}");
        let between = if replicate > 1 { [weights, divided / shard] } else { [0; 2] };
        assert_eq!([summed.calls, summed.sent], between, "{mesh:?}");
        assert_eq!(traffic[1].operation(Operation::AllReduceSum).sent, others, "{mesh:?}");

        let found = gradients(&model, grads);
        for parameter in &parameters {
            let width: usize = parameter.shape[1..].iter().product();
            let [begin, end] = parameter.rows.unwrap_or([0, parameter.shape[0]]);
            let (name, len) = (&parameter.name, (end - begin) * width);
            let (expected, found) = (&expected[name][begin * width..end * width], &found[name][..len]);
            let largest = expected.iter().fold(0_f32, |max, x| max.max(x.abs()));
            for (found, expected) in found.iter().zip(expected) {
                assert!((found - expected).abs() <= 1e-5 * largest, "{mesh:?} {name}: {found} {expected}");
            }
        }
    }
}

pub fn of_another_size_is_refused() {
    let refused =
        Sharded::apply(model(Recipe::Tensorwise), &world(), ShardConfig { replicate: 3, ..ShardConfig::default() })
            .unwrap_err();
    let error = refused.error.to_string();
    assert!(error.contains("parallelism.replicate = 3") && error.contains("do not make 4 ranks"), "{error}");
}
