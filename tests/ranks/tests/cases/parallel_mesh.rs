//! Shards and replicas of the parts of a tensor-parallel model.
use burn::module::Module;
use burn::optim::GradientsParams;
use burn::prelude::*;
use burn_float8::Recipe;
use float8_shard::{ParallelPlan, ShardConfig, Sharded, TensorParallel, TensorStyle};
use models::{Decoder, tensor_plan};
use ranks::{B, bits, gradients};

use super::parallel::{Divided, SIZE, one, random, read};
use super::parallel_model::{Bounds, batch, config as model_config, decoder, runs};
use super::world;

/// Replicas, shards and parts of four ranks.
const MESHES: [[usize; 3]; 3] = [[1, 1, 4], [1, 2, 2], [2, 1, 2]];

fn config([replicate, shard, tensor]: [usize; 3]) -> ShardConfig {
    ShardConfig { replicate, shard: shard as i64, tensor, ..ShardConfig::default() }
}

pub(super) fn applied<M: Module<B>>(model: M, mesh: [usize; 3], plan: &ParallelPlan) -> (M, TensorParallel, Sharded) {
    let (comm, config) = (world(), config(mesh));
    let (model, parallel) = TensorParallel::apply(model, &config.tensor_ranks(&comm).unwrap(), plan).unwrap();
    let (model, sharded) = Sharded::apply(model, &comm, config).unwrap();
    (model, parallel, sharded)
}

/// Each rank has its rows and columns of the gradients of all batches. Ranks of a tensor group read the
/// same batch.
pub fn has_the_gradients_of_one_rank() {
    for (preset, recipe) in runs() {
        let loss = |model: &Decoder<B>, number: usize| {
            let [inputs, targets] = batch(number);
            model.loss(inputs, targets)
        };
        let plan = tensor_plan(&model_config(preset).dims);
        // The next case has the codes of each recipe.
        let meshes = if recipe.is_some() { &MESHES[1..2] } else { &MESHES };
        for mesh in meshes {
            let (whole, readers) = (decoder(preset, recipe), mesh[0] * mesh[1]);
            let losses = (0..readers).map(|number| loss(&whole, number)).reduce(|sum, loss| sum + loss).unwrap();
            let expected = losses.clone().into_scalar();
            let of_whole = gradients(&whole, GradientsParams::from_grads(losses.backward(), &whole));

            let (part, parallel, sharded) = applied(decoder(preset, recipe), *mesh, &plan);
            sharded.precompute_scales(&part);
            let data = sharded.data_communicator();
            assert_eq!(data.world_size(), readers);
            let own = loss(&part, data.rank());
            let found = data.all_reduce_sum("loss", vec![own.clone().into_scalar()]).unwrap().wait().unwrap()[0];
            let mut grads = GradientsParams::from_grads(own.backward(), &part);
            sharded.reduce_gradients(&part, &mut grads).unwrap();
            parallel.reduce_gradients(&part, &mut grads).unwrap();
            let bounds = Bounds::of(recipe, format!("{preset} {recipe:?} {mesh:?}"));
            bounds.check_loss(found, expected);
            bounds.check_gradients(&part, grads, &of_whole);
        }
    }
}

/// With an identity matrix as one factor, a product shows the codes and scales of the other one. Both
/// ranks with other batches read the same one here, so the gradient is twice a rank's.
pub fn codes_are_those_of_a_cast_of_the_whole() {
    let (device, comm) = (Default::default(), world());
    let (eye, tensor) = (|| Tensor::<B, 2>::eye(SIZE, &device), 2);
    let along = |axis| Divided { axis, ranks: tensor, rank: comm.rank() % tensor };
    for recipe in Recipe::ALL {
        let linear = |weight| one(recipe, weight);
        for (x, w, dy) in [(eye(), random(1), eye()), (random(2), eye(), eye()), (eye(), eye(), random(3))] {
            let [y, dx, dw] = read(&linear(w.clone()), x.clone(), dy.clone());
            for (style, of_x, of_y) in
                [(TensorStyle::Colwise, along(0), along(1)), (TensorStyle::Rowwise, along(1), along(0))]
            {
                let plan: ParallelPlan = vec![("linear".into(), style)];
                let (model, _, sharded) = applied(linear(w.clone()), [1, 2, tensor], &plan);
                let parameter = Sharded::parameters::<B, _>(&model).remove(0);
                assert_eq!(parameter.shape, [SIZE, SIZE]);
                let [rows, cols] = [parameter.rows, parameter.cols].map(|of| of.unwrap_or([0, SIZE]));
                let dw = dw.clone().slice([rows[0]..rows[1], cols[0]..cols[1]]) * 2.0;
                let read = || read(&model, of_x.part(x.clone()), of_y.part(dy.clone())).map(bits);
                let expected = [of_y.part(y.clone()), of_x.part(dx.clone()), dw].map(bits);
                let found = read();
                for (i, name) in ["y", "dx", "dw"].into_iter().enumerate() {
                    assert!(found[i] == expected[i], "{recipe} {style:?}: {name} on rank {}", comm.rank());
                }
                // With the amaxes of all weights in one all-reduce; the gradient comes later.
                sharded.precompute_scales(&model);
                assert!(read()[..2] == expected[..2], "{recipe} {style:?}: precomputed on rank {}", comm.rank());
                sharded.reduce_gradients(&model, &mut GradientsParams::new()).unwrap();
            }
        }
    }
}

/// Parts of other ranks than the mesh's, and a mesh without parts.
pub fn of_other_parts_is_refused() {
    let comm = world();
    let one = || one(Recipe::Tensorwise, random(4));
    let refused = |model, mesh, words: &str| {
        let error = Sharded::apply(model, &comm, config(mesh)).unwrap_err().error.to_string();
        assert!(error.contains(words), "{error}");
    };
    let plan: ParallelPlan = vec![("linear".into(), TensorStyle::Colwise)];
    let (parts, _) = TensorParallel::apply(one(), &comm, &plan).unwrap();
    refused(parts, [1, 2, 2], "linear is divided by TensorParallel over 4 ranks, where `tensor` is 2");
    refused(one(), [1, 2, 2], "the model has no linear that TensorParallel divides, where `tensor` is 2");
}
