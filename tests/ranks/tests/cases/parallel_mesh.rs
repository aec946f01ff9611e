//! Shards and replicas of the parts of a tensor-parallel model.
use burn::module::Module;
use burn::nn::{Linear, LinearConfig};
use burn::optim::GradientsParams;
use burn::prelude::*;
use burn_float8::{Float8Config, Recipe};
use float8_shard::{ParallelPlan, ShardConfig, Sharded, TensorParallel, TensorStyle};
use models::{CausalLmExt, Decoder, tensor_plan};
use ranks::{B, Inner, bits};

use super::parallel::{SIZE, random};
use super::parallel_model::{batch, config as model_config, gradients};
use super::world;

/// Replicas, shards and parts of four ranks.
const MESHES: [[usize; 3]; 3] = [[1, 1, 4], [1, 2, 2], [2, 1, 2]];

fn config([replicate, shard, tensor]: [usize; 3]) -> ShardConfig {
    ShardConfig { replicate, shard: shard as i64, tensor, ..ShardConfig::default() }
}

fn applied<M: Module<B>>(model: M, mesh: [usize; 3], plan: &ParallelPlan) -> (M, TensorParallel, Sharded) {
    let (comm, config) = (world(), config(mesh));
    let (model, parallel) = TensorParallel::apply(model, &config.tensor_ranks(&comm).unwrap(), plan).unwrap();
    let (model, sharded) = Sharded::apply(model, &comm, config).unwrap();
    (model, parallel, sharded)
}

/// Each rank has its rows and columns of the gradients of all batches. Ranks of a tensor group read the
/// same batch.
pub fn has_the_gradients_of_one_rank() {
    let device = Default::default();
    burn_float8::set_default_config::<B>(&device, None).unwrap();
    let mut runs = vec![("llama3-debug", None), ("qwen3-debug", None)];
    runs.extend(Recipe::ALL.map(|recipe| ("llama3-debug", Some(recipe))));
    for (preset, recipe) in runs {
        let build = || {
            let model = Decoder::<B>::new(model_config(preset), &device).unwrap().init_weights(0);
            match recipe {
                Some(recipe) => Float8Config::new(recipe).apply(model).unwrap().0,
                None => model,
            }
        };
        let loss = |model: &Decoder<B>, number: usize| {
            let [inputs, targets] = batch(number);
            model.loss(inputs, targets)
        };
        let plan = tensor_plan(&model_config(preset).dims);
        // The next case has the codes of each recipe.
        let meshes = if recipe.is_some() { &MESHES[1..2] } else { &MESHES };
        for mesh in meshes {
            let (whole, readers) = (build(), mesh[0] * mesh[1]);
            let losses = (0..readers).map(|number| loss(&whole, number)).reduce(|sum, loss| sum + loss).unwrap();
            let expected = losses.clone().into_scalar();
            let of_whole = gradients(&whole, &mut GradientsParams::from_grads(losses.backward(), &whole));

            let (part, parallel, sharded) = applied(build(), *mesh, &plan);
            sharded.precompute_scales(&part);
            let data = sharded.data_communicator();
            assert_eq!(data.world_size(), readers);
            let own = loss(&part, data.rank());
            let found = data.all_reduce_sum("loss", vec![own.clone().into_scalar()]).unwrap().wait().unwrap()[0];
            let mut grads = GradientsParams::from_grads(own.backward(), &part);
            sharded.reduce_gradients(&part, &mut grads).unwrap();
            parallel.reduce_gradients(&part, &mut grads).unwrap();
            let [of_loss, bound] = if recipe.is_some() { [1e-4, 0.15] } else { [1e-6, 1e-5] };
            let what = format!("{preset} {recipe:?} {mesh:?}");
            assert!((found - expected).abs() < of_loss * expected, "{what}: {found}, not {expected}");
            let mut own = gradients(&part, &mut grads);
            for parameter in Sharded::parameters::<B, _>(&part) {
                let (name, (_, all)) = (&parameter.name, &of_whole[&parameter.name]);
                let width: usize = parameter.shape[1..].iter().product();
                let [top, bottom] = parameter.rows.unwrap_or([0, parameter.shape[0]]);
                let [left, right] = parameter.cols.unwrap_or([0, width]);
                let expected: Vec<_> =
                    (top..bottom).flat_map(|row| &all[row * width + left..row * width + right]).copied().collect();
                let mut own = own.remove(name).unwrap().1;
                // Padding of a shard.
                own.truncate(expected.len());
                assert_eq!(own.len(), expected.len(), "{what} {name}");
                let norm = |values: &mut dyn Iterator<Item = f32>| values.map(|v| f64::from(v).powi(2)).sum::<f64>();
                let far = norm(&mut own.iter().zip(&expected).map(|(a, b)| a - b));
                let far = (far / norm(&mut expected.iter().copied())).sqrt();
                assert!(far <= f64::from(bound), "{what}: {name} is off by {far} of its norm");
            }
        }
    }
}

/// A linear with a name.
#[derive(Module, Debug)]
struct One<B: Backend> {
    linear: Linear<B>,
}

/// y, dx and dw of a linear without bias.
fn read(One { linear }: &One<B>, x: Tensor<B, 2>, dy: Tensor<B, 2>) -> [Tensor<Inner, 2>; 3] {
    let x = x.detach().require_grad();
    let y = linear.forward(x.clone());
    let grads = (y.clone() * dy.detach()).sum().backward();
    [y.inner(), x.grad(&grads).unwrap(), linear.weight.val().grad(&grads).unwrap()]
}

/// With an identity matrix as one factor, a product shows the codes and scales of the other one. Both
/// ranks with other batches read the same one here, so the gradient is twice a rank's.
pub fn codes_are_those_of_a_cast_of_the_whole() {
    let (device, comm) = (Default::default(), world());
    let (eye, tensor) = (|| Tensor::<B, 2>::eye(SIZE, &device), 2);
    let place = comm.rank() % tensor;
    let part = |t: Tensor<Inner, 2>, axis: usize| t.narrow(axis, place * (SIZE / tensor), SIZE / tensor);
    let own = |t: Tensor<B, 2>, axis: usize| t.narrow(axis, place * (SIZE / tensor), SIZE / tensor);
    for recipe in Recipe::ALL {
        let linear = |weight: Tensor<B, 2>| {
            let linear = LinearConfig::new(SIZE, SIZE).with_bias(false).init::<B>(&device);
            let weight = linear.weight.map(|_| weight.detach().require_grad());
            Float8Config::new(recipe).apply(One { linear: Linear { weight, ..linear } }).unwrap().0
        };
        for (x, w, dy) in [(eye(), random(1), eye()), (random(2), eye(), eye()), (eye(), eye(), random(3))] {
            let [y, dx, dw] = read(&linear(w.clone()), x.clone(), dy.clone());
            for (style, of_x, of_y) in [(TensorStyle::Colwise, 0, 1), (TensorStyle::Rowwise, 1, 0)] {
                let plan: ParallelPlan = vec![("linear".into(), style)];
                let (model, _, sharded) = applied(linear(w.clone()), [1, 2, tensor], &plan);
                let parameter = Sharded::parameters::<B, _>(&model).remove(0);
                assert_eq!(parameter.shape, [SIZE, SIZE]);
                let [rows, cols] = [parameter.rows, parameter.cols].map(|of| of.unwrap_or([0, SIZE]));
                let dw = dw.clone().slice([rows[0]..rows[1], cols[0]..cols[1]]) * 2.0;
                let read = || read(&model, own(x.clone(), of_x), own(dy.clone(), of_y)).map(bits);
                let expected = [part(y.clone(), of_y), part(dx.clone(), of_x), dw].map(bits);
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
    let (comm, device) = (world(), Default::default());
    let one = || {
        B::seed(&device, 4);
        One { linear: LinearConfig::new(SIZE, SIZE).init::<B>(&device) }
    };
    let refused = |model: One<B>, mesh, words: &str| {
        let error = Sharded::apply(model, &comm, config(mesh)).unwrap_err().error.to_string();
        assert!(error.contains(words), "{error}");
    };
    let plan: ParallelPlan = vec![("linear".into(), TensorStyle::Colwise)];
    let (parts, _) = TensorParallel::apply(one(), &comm, &plan).unwrap();
    refused(parts, [1, 2, 2], "linear is divided by TensorParallel over 4 ranks, where `tensor` is 2");
    refused(one(), [1, 2, 2], "the model has no linear that TensorParallel divides, where `tensor` is 2");
}
