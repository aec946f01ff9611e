//! Replicas of shards: four ranks as 1 × 4, 2 × 2 and 4 × 1 train as one rank does.
use burn::module::{Module, ModuleVisitor, Param};
use burn::optim::GradientsParams;
use burn::tensor::Tensor;
use burn::tensor::backend::AutodiffBackend;
use burn_float8::Recipe;
use float8_shard::{Operation, ReduceDtype, Reshard, ShardConfig, Sharded};
use ranks::{B, Net, Training, batch, model};

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

fn sharded(model: Net<B>, config: ShardConfig) -> Training {
    let (model, sharded) = Sharded::apply(model, &world(), config).unwrap();
    Training::new(model, Some(sharded))
}

/// Losses of a mesh differ from one rank's by at most what a reverse order of the micro-batches
/// changes on one rank. The first loss differs by its rounding.
pub fn is_one_rank() {
    let some = [Recipe::Tensorwise, Recipe::Delayed, Recipe::RowwiseWithGwHp, Recipe::Mxfp8];
    let recipes = if std::env::var_os(ALL).is_some() { &Recipe::ALL[..] } else { &some };
    for recipe in recipes {
        let train = |mut training: Training| -> Vec<f32> { (0..STEPS).map(|_| training.step(RANKS)).collect() };
        let one = train(Training::new(model(*recipe), None));
        let reversed = train(Training::new(model(*recipe), None).reversed());
        let distance = |losses: &[f32]| -> f32 {
            losses.iter().zip(&one).map(|(loss, one)| (loss - one).abs() / one).fold(0.0, f32::max)
        };
        for mesh in MESHES {
            let losses = train(sharded(model(*recipe), config(mesh)));
            assert!((losses[0] - one[0]).abs() <= 1e-5 * one[0], "{recipe} {mesh:?}: {losses:?} and {one:?}");
            let limit = distance(&reversed);
            if world().rank() == 0 {
                println!("{recipe} {mesh:?}: {:.2e}, with reversed micro-batches {limit:.2e}", distance(&losses));
            }
            assert!(distance(&losses) <= limit, "{recipe} {mesh:?}: {} of {limit}", distance(&losses));
        }
        // Gathered weights that are freed, and gradients in bf16.
        let other = ShardConfig { reshard: Reshard::AfterForward, reduce_dtype: ReduceDtype::Bf16, ..config([2, 2]) };
        let losses = train(sharded(model(*recipe), other));
        assert!(distance(&losses) <= 1e-2, "{recipe}: {losses:?} and {one:?}");
    }
}

struct Read {
    grads: GradientsParams,
    values: Vec<Vec<f32>>,
}

impl ModuleVisitor<B> for Read {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
        let gradient = self.grads.remove::<<B as AutodiffBackend>::InnerBackend, D>(param.id).expect("a gradient");
        self.values.push(gradient.into_data().to_vec().unwrap());
    }
}

fn gradients(model: &Net<B>, grads: GradientsParams) -> Vec<Vec<f32>> {
    let mut read = Read { grads, values: vec![] };
    model.visit(&mut read);
    read.values
}

/// Each rank has its rows of the gradient of all micro-batches, and moves the bytes that the mesh
/// needs.
pub fn has_the_gradients_of_one_rank() {
    let (comm, device) = (world(), Default::default());
    let plain = || Net::<B>::new(&device);
    burn_float8::set_default_config::<B>(&device, None).unwrap();
    let whole = plain();
    let loss = (0..RANKS).map(|number| whole.loss(batch(number, &device))).reduce(|sum, loss| sum + loss);
    let expected = gradients(&whole, GradientsParams::from_grads(loss.unwrap().backward(), &whole));
    for mesh in MESHES {
        let (model, sharded) = Sharded::apply(plain(), &comm, config(mesh)).unwrap();
        let before = comm.traffic();
        let loss = model.loss(batch(comm.rank(), &device));
        let mut grads = GradientsParams::from_grads(loss.backward(), &model);
        let traffic = comm.traffic().since(&before);
        let [scattered, summed] =
            [Operation::ReduceScatterSum, Operation::AllReduceSum].map(|of| traffic.operation(of));
        // Four weights; between replicas each rank sums its rows alone.
        let [replicate, shard] = mesh;
        let is = |yes: bool| if yes { 4 } else { 0 };
        assert_eq!([scattered.calls, summed.calls], [is(shard > 1), is(replicate > 1 && shard > 1)], "{mesh:?}");
        assert_eq!(summed.sent * shard as u64 * is(true), scattered.sent * summed.calls, "{mesh:?}");
        sharded.reduce_gradients(&model, &mut grads).unwrap();
        let parameters = Sharded::parameters::<B, _>(&model);
        for ((parameter, found), expected) in parameters.iter().zip(gradients(&model, grads)).zip(&expected) {
            let width: usize = parameter.shape[1..].iter().product();
            let [begin, end] = parameter.rows.unwrap_or([0, parameter.shape[0]]);
            let (expected, found) = (&expected[begin * width..end * width], &found[..(end - begin) * width]);
            let largest = expected.iter().fold(0_f32, |max, x| max.max(x.abs()));
            for (found, expected) in found.iter().zip(expected) {
                assert!((found - expected).abs() <= 1e-5 * largest, "{mesh:?} {}: {found} {expected}", parameter.name);
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
