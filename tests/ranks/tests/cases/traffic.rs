//! Traffic and memory of ranks.
use burn::module::Module;
use burn::optim::GradientsParams;
use burn_float8::{Float8Config, Recipe, report};
use float8_shard::{Operation, Reshard, ShardConfig, Sharded, TensorStyle};
use ranks::{B, Batches, Part, Training, batch, gradients, model, net};

use super::parallel::{self, SIZE, STYLES, plain, random};
use super::{ON_DEVICE, mesh, world};

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
            // Codes and scales for fprop and dgrad, and the embedding's values.
            let operands = linears
                .iter()
                .flat_map(|[rows, n]| [gather_of(recipe, [*n, *rows], false), gather_of(recipe, [*rows, *n], true)]);
            let of_all: Vec<_> = operands.chain([gather(table, 0)]).collect();
            let expected = [0, 1].map(|i| gathers * of_all.iter().map(|one| one[i]).sum::<u64>());
            assert_eq!(found(Operation::AllGather), expected, "{recipe} {reshard:?}");
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

/// Calls and bytes of a gather of codes or values, and of scales unless every rank has the same. Devices
/// gather scales in a second call.
fn gather(values: usize, scales: usize) -> [u64; 2] {
    let calls = if ON_DEVICE && scales > 0 { 2 } else { 1 };
    [calls, (values + scales) as u64]
}

/// The same of a rank's operand `[rows, k]` of a weight, for dgrad or fprop. On devices rows of codes are
/// multiples of 16 bytes, and MX scales are whole tiles of 128 rows by 4.
fn gather_of(recipe: Recipe, [rows, k]: [usize; 2], is_of_dgrad: bool) -> [u64; 2] {
    let padded = |len: usize, align| if ON_DEVICE { len.next_multiple_of(align) } else { len };
    let scales = match recipe {
        Recipe::Tensorwise | Recipe::Delayed | Recipe::RowwiseWithGwHp => 0,
        Recipe::Rowwise if is_of_dgrad => 4 * rows,
        Recipe::Rowwise => 0,
        Recipe::Blockwise => 4 * rows.div_ceil(128) * k.div_ceil(128),
        _ => padded(rows, 128) * padded(k.div_ceil(32), 4),
    };
    gather(rows * padded(k, 16), scales)
}

/// Calls and bytes that a step of two linears exchanges: gathers of x or dy, sums of y or dx, and amaxes.
/// One gather of codes serves two GEMMs where both read the same codes, and a gather of x serves both
/// linears.
pub fn bytes_of_tokens() {
    let comm = world();
    let ranks = comm.world_size();
    let (part, lines) = (SIZE * SIZE / ranks, 4 * SIZE);
    for recipe in Recipe::ALL {
        // Of x or dy: codes or values of the first gather, and of wgrad's own.
        let [first, late] = match recipe {
            Recipe::Tensorwise | Recipe::Delayed => [gather(part, 0), [0; 2]],
            Recipe::Rowwise => [gather(part, lines / ranks), gather(part, 0)],
            Recipe::RowwiseWithGwHp => [gather(part, lines / ranks), gather(4 * part, 0)],
            Recipe::Blockwise | Recipe::Mxfp8 => [gather(part, part / 32); 2],
            Recipe::Mxfp8WgradWithHp => [gather(part, part / 32), gather(4 * part, 0)],
        };
        for (style, [of_x, _]) in STYLES {
            let two = Float8Config::new(recipe).apply([5, 6].map(|seed| plain(random(seed))).to_vec()).unwrap().0;
            let plan = vec![("*".into(), style)];
            let Part { model: two, sharded, .. } = Part::new(two, &comm, mesh([1, 1, ranks]), &plan);
            let mut before = comm.traffic();
            sharded.precompute_scales(&two);
            let of_weights = comm.traffic().since(&before).operation(Operation::AllReduceMaxBits).calls;
            before = comm.traffic();
            let x = parallel::part(&random(4), of_x, ranks).require_grad();
            let y = two[0].forward(x.clone()) + two[1].forward(x);
            let mut grads = GradientsParams::from_grads(y.sum().backward(), &two);
            sharded.reduce_gradients(&two, &mut grads).unwrap();
            let traffic = comm.traffic().since(&before);
            let found = |of| [traffic.operation(of).calls, traffic.operation(of).sent];
            // x once, and dy for each linear; in histories also the amaxes of a step, of x, w and dy.
            let is_colwise = style == TensorStyle::Colwise;
            let amaxes = match recipe {
                Recipe::Tensorwise => [3, 3 * 4],
                Recipe::Delayed => [4, 3 * 4 + 2 * 3 * 4],
                Recipe::Rowwise => [3, 3 * lines],
                Recipe::RowwiseWithGwHp if is_colwise => [2, 2 * lines],
                Recipe::RowwiseWithGwHp => [1, lines],
                _ => [0, 0],
            };
            let gathers = [0, 1].map(|i| if is_colwise { first[i] + 2 * late[i] } else { 2 * (first[i] + late[i]) });
            let what = format!("{recipe} {style:?}");
            assert_eq!(found(Operation::AllGather), gathers, "{what}");
            // dx or y of each linear, in its dtype.
            assert_eq!(found(Operation::ReduceScatterSum), [2, 2 * (SIZE * lines) as u64], "{what}");
            assert_eq!(found(Operation::AllReduceMaxBits), amaxes.map(|n| n as u64), "{what}");
            assert_eq!(of_weights, u64::from(amaxes[0] > 0), "{what}: one for all weights");
        }
    }
}

/// Gradients of replicas: each rank gives the divided weights with their padding, its shards to the other
/// replicas, and all other parameters, in f32. Four replicas divide none.
pub fn bytes_of_replicas() {
    let comm = world();
    for (replicate, weights) in [(2, 4), (4, 0)] {
        let config = ShardConfig { replicate, ..ShardConfig::default() };
        let training = Training::sharded(net(None), &comm, config, Batches::of_one(4));
        let before = comm.traffic();
        training.gradients();
        let traffic = comm.traffic().since(&before);
        let shards = 4 / replicate;
        let (mut divided, mut others) = (0, 0);
        for parameter in Sharded::parameters::<B, _>(&training.model) {
            let width: usize = parameter.shape[1..].iter().product();
            match parameter.is_shard {
                true => divided += 4 * shards * parameter.shape[0].div_ceil(shards).next_multiple_of(16) * width,
                false => others += 4 * parameter.shape[0] * width,
            }
        }
        let scattered = traffic.operation(Operation::ReduceScatterSum);
        assert_eq!([scattered.calls, scattered.sent], [weights, divided as u64], "{config:?}");
        // Also the loss.
        let summed = divided / shards + others + 4;
        assert_eq!(traffic.operation(Operation::AllReduceSum).sent, summed as u64, "{config:?}");
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
