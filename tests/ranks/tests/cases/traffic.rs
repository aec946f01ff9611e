//! Traffic and memory of ranks.
use burn::module::{Module, ModuleVisitor, Param};
use burn::optim::GradientsParams;
use burn::tensor::Tensor;
use burn::tensor::backend::AutodiffBackend;
use burn_float8::{Recipe, report};
use float8_shard::{Operation, Reshard, ShardConfig, Sharded};
use ranks::{B, Training, batch, model};

use super::world;

pub fn bytes_on_the_wire() {
    let comm = world();
    for (recipe, share) in
        [(Recipe::Tensorwise, 0.5), (Recipe::Delayed, 0.5), (Recipe::Mxfp8, 0.52), (Recipe::Blockwise, 0.52)]
    {
        for (reshard, per_step) in [(Reshard::AfterStep, 2), (Reshard::AfterForward, 4)] {
            let (model, sharded) =
                Sharded::apply(model(recipe), &comm, ShardConfig { reshard, ..ShardConfig::default() }).unwrap();
            let shapes = Sharded::parameters::<ranks::B, _>(&model);
            let mut training = Training::new(model, Some(sharded));
            // The second step begins the histories; its first cast uses the weight's own amax.
            training.step(2 * comm.world_size());
            training.step(2 * comm.world_size());
            let before = comm.traffic();
            training.step(2 * comm.world_size());
            let traffic = comm.traffic().since(&before);
            // Scales of blocks cover only one rank's rows, so they need no amax of other ranks.
            let amaxes = u64::from(!matches!(recipe, Recipe::Mxfp8 | Recipe::Blockwise));
            let has_gradient = 1;
            assert_eq!(traffic.operation(Operation::AllReduceMaxBits).calls, amaxes + has_gradient, "{recipe}");
            // The table is gathered in f32, each linear as codes in both orientations.
            let of = |name: &str| shapes.iter().find(|p| p.name == format!("{name}.weight")).unwrap().shape.clone();
            let align = if matches!(recipe, Recipe::Mxfp8 | Recipe::Blockwise) { 128 } else { 16 };
            let elements = |shape: Vec<usize>, align: usize| {
                shape[0].div_ceil(comm.world_size()).next_multiple_of(align) * shape[1]
            };
            let linears: usize = ["up", "down", "head"].iter().map(|name| elements(of(name), align)).sum();
            let micro_batches = per_step / 2;
            let gathers = traffic.operation(Operation::AllGather);
            assert_eq!(gathers.calls, 3 * per_step + micro_batches, "{recipe}");
            let table = 4 * elements(of("embedding"), 16) as u64 * micro_batches;
            let bytes = (gathers.sent - table) as f64 / per_step as f64;
            let bf16 = 2.0 * linears as f64;
            assert!(bytes <= share * bf16 + 12.0, "{recipe}: {bytes} of {bf16}");
            if share == 0.5 {
                assert_eq!(bytes, share * bf16, "{recipe}");
            }
        }
    }
}

/// A forward without a graph and a second one with it, as in activation checkpointing.
pub fn gathers_of_recomputation() {
    let comm = world();
    for (reshard, per_step) in [(Reshard::AfterStep, 2), (Reshard::AfterForward, 6)] {
        let config = ShardConfig { reshard, ..ShardConfig::default() };
        let (model, _sharded) = Sharded::apply(model(Recipe::Tensorwise), &comm, config).unwrap();
        for number in 0..2 {
            let batch = batch(number, &Default::default());
            let loss = model.clone().no_grad().loss(batch.clone()).into_scalar();
            let again = model.loss(batch);
            assert_eq!(again.clone().into_scalar(), loss);
            again.backward();
        }
        for layer in report(&model).layers {
            let gathers = layer.sharding.expect("it is sharded").float8_gathers;
            assert_eq!(gathers, per_step, "{reshard:?} {}", layer.name);
        }
    }
}

/// From the second step on, all but a step's first gather start while another layer computes, and
/// none is wasted.
pub fn gathers_run_ahead() {
    for (reshard, per_step) in [(Reshard::AfterStep, 2), (Reshard::AfterForward, 4)] {
        let config = ShardConfig { reshard, ..ShardConfig::default() };
        let (model, sharded) = Sharded::apply(model(Recipe::Tensorwise), &world(), config).unwrap();
        let mut training = Training::new(model, Some(sharded));
        let mut step = |micro_batches: usize| {
            training.step(2 * micro_batches);
            let layers = report(&training.model).layers.into_iter();
            let gathers = layers.filter_map(|layer| layer.sharding).map(|s| [s.float8_gathers, s.float8_gathers_ahead]);
            gathers.fold([0; 2], |[all, ahead], [more, more_ahead]| [all + more, ahead + more_ahead])
        };
        let first = 3 * per_step;
        assert_eq!(step(2), [first, 0], "{reshard:?}: the first step is the example");
        assert_eq!(step(2), [2 * first, first - 1], "{reshard:?}");
        assert_eq!(step(2), [3 * first, 2 * (first - 1)], "{reshard:?}");
        // A step that ends earlier than the last one drops the gather in flight.
        let [all, ahead] = step(1);
        let (gathers, in_vain) = if reshard == Reshard::AfterStep { (6, 0) } else { (6, 1) };
        assert_eq!([all - 3 * first, ahead - 2 * (first - 1)], [gathers + in_vain, 5 + in_vain], "{reshard:?}");
        assert!(training.step(2).is_finite());
    }
}

/// Rows and columns of each parameter; its gradient has the same shape.
struct Sizes {
    grads: GradientsParams,
    own: Vec<[usize; 2]>,
}

impl ModuleVisitor<B> for Sizes {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
        let dims = param.val().dims();
        let gradient = self.grads.get::<<B as AutodiffBackend>::InnerBackend, D>(param.id).expect("a gradient");
        assert_eq!(gradient.dims(), dims);
        self.own.push([dims[0], dims[1..].iter().product()]);
    }
}

pub fn memory_of_a_rank() {
    let comm = world();
    for recipe in Recipe::ALL {
        let (shards, sharded) = Sharded::apply(model(recipe), &comm, ShardConfig::default()).unwrap();
        let summary = sharded.summary();
        let ranks = comm.world_size() as u64;
        // Norm and biases are replicated.
        let replicated = 2 * 40 + 144 + 40;
        assert_eq!(summary.replicated, 4);
        assert_eq!(summary.elements_per_rank * ranks, summary.elements + summary.padding + (ranks - 1) * replicated);
        // Each rank holds its share of each parameter and an equally large gradient.
        let loss = shards.loss(batch(0, &Default::default()));
        let grads = GradientsParams::from_grads(loss.backward(), &shards);
        let mut sizes = Sizes { grads, own: vec![] };
        shards.visit(&mut sizes);
        assert_eq!(sizes.own.iter().map(|[rows, n]| (rows * n) as u64).sum::<u64>(), summary.elements_per_rank);
        let parameters = Sharded::parameters::<B, _>(&shards);
        assert_eq!(parameters.iter().filter(|parameter| parameter.rows.is_some()).count(), 4);
        for (parameter, [rows, _]) in parameters.iter().zip(sizes.own) {
            if parameter.rows.is_some() {
                let share = parameter.shape[0].div_ceil(comm.world_size());
                assert!((share..share + 128).contains(&rows), "{parameter:?}: {rows} rows");
            }
        }
    }
}
