//! Traffic and memory of ranks.
use burn::module::Module;
use burn::optim::GradientsParams;
use burn_float8::{Recipe, report};
use float8_shard::{Operation, Reshard, ShardConfig, Sharded};
use ranks::{B, Batches, Training, batch, gradients, model};

use super::world;

/// Bytes that a rank gives in a step of two micro-batches.
pub fn bytes_on_the_wire() {
    let comm = world();
    let ranks = comm.world_size();
    for recipe in Recipe::ALL {
        for (reshard, gathers) in [(Reshard::AfterStep, 1), (Reshard::AfterForward, 2)] {
            let config = ShardConfig { reshard, ..ShardConfig::default() };
            let mut training = Training::sharded(model(recipe), &comm, config, Batches::of_one(2 * ranks));
            let shapes = Sharded::parameters::<B, _>(&training.model);
            // The second step begins the histories; its first cast uses the weight's own amax.
            training.losses(2);
            let before = comm.traffic();
            training.step();
            let traffic = comm.traffic().since(&before);
            let found = |of| [traffic.operation(of).calls, traffic.operation(of).sent];

            let has_blocks = matches!(recipe, Recipe::Blockwise | Recipe::Mxfp8 | Recipe::Mxfp8WgradWithHp);
            let own = |name: &str, align: usize| {
                let shape = &shapes.iter().find(|p| p.name == format!("{name}.weight")).expect("a parameter").shape;
                [shape[0].div_ceil(ranks).next_multiple_of(align), shape[1]]
            };
            let linears = ["up", "down", "head"].map(|name| own(name, if has_blocks { 128 } else { 16 }));
            let [rows, width] = own("embedding", 16);
            let table = 4 * rows * width;
            // Codes and scales for fprop and dgrad.
            let operands: usize = linears.iter().map(|own| 2 * own[0] * own[1] + scales(recipe, *own)).sum();
            let expected = [6 * gathers + gathers, gathers * (operands + table)];
            assert_eq!(found(Operation::AllGather), expected.map(|n| n as u64), "{recipe} {reshard:?}");
            // Each weight's gradient of each micro-batch.
            let divided = 2 * ranks * (linears.iter().map(|[rows, n]| 4 * rows * n).sum::<usize>() + table);
            assert_eq!(found(Operation::ReduceScatterSum), [8, divided as u64], "{recipe}");
            // One call for gradients of the norm and of biases, and one for the loss.
            let replicated = 4 * (2 * 40 + 144 + 40) + 4;
            assert_eq!(found(Operation::AllReduceSum), [2, replicated], "{recipe}");
            // One call for amaxes, and one that tells which of four replicated parameters have gradients.
            let columns = 4 * linears.iter().map(|own| own[1]).sum::<usize>();
            let amaxes = match recipe {
                _ if has_blocks => [0, 0],
                Recipe::Tensorwise => [1, 3 * 4],
                // Of x, w and dy.
                Recipe::Delayed => [1, 3 * 3 * 4],
                Recipe::RowwiseWithGwHp => [1, columns + 3 * 4],
                _ => [1, columns],
            };
            let expected = [amaxes[0] + 1, amaxes[1] + 4 * 4].map(|n| n as u64);
            assert_eq!(found(Operation::AllReduceMaxBits), expected, "{recipe}");
        }
    }
}

/// Bytes of the scales of a rank's rows for fprop and dgrad, where ranks have different ones.
fn scales(recipe: Recipe, [rows, n]: [usize; 2]) -> usize {
    match recipe {
        Recipe::Tensorwise | Recipe::Delayed | Recipe::RowwiseWithGwHp => 0,
        // Of rows, in dgrad.
        Recipe::Rowwise => 4 * rows,
        Recipe::Blockwise => 2 * 4 * (rows / 128) * n.div_ceil(128),
        _ => (rows / 32 * n) + (rows * n.div_ceil(32)),
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
        let mut training = Training::sharded(model(Recipe::Tensorwise), &world(), config, Batches::of_one(4));
        let mut step = |micro_batches: usize| {
            training.batches.passes = 2 * micro_batches;
            training.step();
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
        assert!(training.step().is_finite());
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
        let own = gradients(&shards, grads);
        assert_eq!(own.values().map(|own| own.len() as u64).sum::<u64>(), summary.elements_per_rank);
        let parameters = Sharded::parameters::<B, _>(&shards);
        let divided: Vec<_> = parameters.iter().filter(|parameter| parameter.is_shard).collect();
        assert_eq!(divided.len(), 4);
        for parameter in divided {
            let rows = own[&parameter.name].len() / parameter.shape[1];
            let share = parameter.shape[0].div_ceil(comm.world_size());
            assert!((share..share + 128).contains(&rows), "{parameter:?}: {rows} rows");
        }
    }
}
