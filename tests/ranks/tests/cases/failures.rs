//! Models, plans and uses of shards that are refused.
use burn::module::{Module, ModuleMapper, Param};
use burn::nn::{Embedding, Initializer, LayerNormConfig, Linear, LinearConfig};
use burn::optim::{GradientsParams, MuonConfig, Optimizer};
use burn::prelude::*;
use burn::tensor::DType;
use burn_float8::config::DelayedScaling;
use burn_float8::{ApplyError, Float8Config, Float8LinearConfig, GroupedLinear, Recipe, StatisticsConfig};
use float8_shard::{ShardConfig, ShardError, Sharded, TensorParallel, TensorStyle, full_tensor};
use ranks::{B, Net, VOCABULARY, decoder, mixture, model};

use super::parallel::{block, one, random};
use super::{ON_DEVICE, experts, mesh, world};

/// Asserts that every rank refuses a model with these words.
fn refused<M, H>(outcome: Result<(M, H), ApplyError<M, ShardError>>, words: &[&str]) {
    let Err(refused) = outcome else { panic!("not refused: {words:?}") };
    let error = refused.error.to_string();
    assert!(words.iter().all(|word| error.contains(word)), "{error}, without {words:?}");
}

fn shard<M: Module<B>>(model: M) -> Result<(M, Sharded), ApplyError<M, ShardError>> {
    Sharded::apply(model, &world(), ShardConfig::default())
}

fn linear(k: usize) -> Linear<B> {
    B::seed(&Default::default(), 1);
    Float8Config::tensorwise().apply(LinearConfig::new(k, 32).init(&Default::default())).unwrap().0
}

/// Models of other shapes, and of equal shapes whose exchanges differ in content or order. The ranks
/// continue together.
pub fn models_that_differ() {
    let is_odd = world().rank() % 2 == 1;
    let tensorwise = Float8Config::tensorwise;
    let margin = |margin| {
        let scaling = DelayedScaling { margin, ..DelayedScaling::default() };
        Float8Config::new(Recipe::Delayed)
            .with_override(["*"], Float8LinearConfig::new(Recipe::Delayed).with_delayed_scaling(scaling))
    };
    let statistics = |every| tensorwise().with_statistics(StatisticsConfig::every(every));
    let net = |config: Float8Config| config.apply(Net::new(&Default::default())).unwrap().0;
    refused(shard(linear(if is_odd { 65 } else { 64 })), &["[64, 32]", "[65, 32]", "rank 1"]);
    refused(shard(net(margin(if is_odd { 1 } else { 0 }))), &["margin", "rank 1"]);
    refused(shard(net(statistics(if is_odd { 3 } else { 1 }))), &["every_n_steps", "rank 1"]);
    let frozen = net(tensorwise());
    refused(shard(if is_odd { frozen.no_grad() } else { frozen }), &["gradient: false", "rank 1"]);
    let other = net(tensorwise());
    refused(shard(if is_odd { other.map(&mut Changed) } else { other }), &["the first values of parameters", "rank 1"]);
    if !ON_DEVICE {
        let cast = net(tensorwise());
        refused(shard(if is_odd { cast.map(&mut Bf16) } else { cast }), &["BF16", "rank 1"]);
    }
    shard(net(tensorwise())).unwrap();
}

/// Casts embeddings to another dtype.
struct Bf16;

impl ModuleMapper<B> for Bf16 {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<B, D>>) -> Param<Tensor<B, D>> {
        param.map(|t| if t.dims()[0] == VOCABULARY { t.cast(DType::BF16).detach().require_grad() } else { t })
    }
}

/// Changes values like an optimizer step.
struct Changed;

impl ModuleMapper<B> for Changed {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<B, D>>) -> Param<Tensor<B, D>> {
        param.map(|t| (t * 0.5).detach().require_grad())
    }
}

/// On four ranks: parts that are no whole blocks, a plan that names no module or another kind, a second
/// division, parts of other ranks than the mesh's, a mesh without parts, and nothing to divide.
pub fn what_ranks_cannot_divide() {
    let (comm, device) = (world(), Default::default());
    refused(shard(shard(linear(64)).unwrap().0), &["linear is sharded already"]);
    refused(shard(LayerNormConfig::new(8).init::<B>(&device)), &["there is nothing to shard"]);

    let divide = |name: &str, style, width| {
        TensorParallel::apply(block(Recipe::Mxfp8, width), &comm, &vec![(name.into(), style)])
    };
    let columns = "up has 192 columns, which 4 ranks do not divide into multiples of 128";
    refused(divide("gate", TensorStyle::Colwise, 512), &["plan: \"gate\" matches none"]);
    refused(
        divide("norm", TensorStyle::Rowwise, 512),
        &["norm is no linear and no embedding, so ranks cannot divide it"],
    );
    refused(divide("up", TensorStyle::Colwise, 192), &[columns]);
    let grouped = GroupedLinear::<B>::new(2, 128, 128, &Initializer::Zeros, &device);
    let plan = vec![("0".into(), TensorStyle::Colwise)];
    refused(TensorParallel::apply(vec![grouped], &comm, &plan), &["0 is no linear and no embedding"]);
    let parts = || divide("up", TensorStyle::Colwise, 512).unwrap().0;
    refused(shard(parts()), &["up is divided by TensorParallel"]);
    let in_halves = mesh([1, 2, 2]);
    let words = "up is divided by TensorParallel over 4 ranks, where `tensor` is 2";
    refused(Sharded::apply(parts(), &comm, in_halves), &[words]);
    let whole = one(Float8Config::tensorwise(), random(4));
    let words = "the model has no linear that TensorParallel divides, where `tensor` is 2";
    refused(Sharded::apply(whole, &comm, in_halves), &[words]);

    let narrow = decoder("llama3-debug-moe", |dims| (dims.intermediate_size, dims.num_layers) = (96, 1));
    let squares = Float8Config::new(Recipe::Blockwise).apply(narrow).unwrap().0;
    let words = "has experts of 128 x 96: 1 of them on a rank do not end where a block of 128 ends";
    refused(Sharded::apply(squares, &comm, experts::config()), &[words]);
    let once = Sharded::apply(mixture(None), &comm, experts::config()).unwrap().0;
    refused(Sharded::apply(once, &comm, experts::config()), &["is sharded already"]);
}

pub fn record_of_another_shape() {
    let (model, _) = shard(linear(64)).unwrap();
    model.load_record(linear(48).into_record()).forward(Tensor::<B, 2>::ones([4, 64], &Default::default()));
}

/// Muon multiplies gradients, which is not element-wise.
pub fn muon() {
    let (model, _) = shard(two()).unwrap();
    let x = Tensor::<B, 2>::ones([4, 64], &Default::default());
    let loss = model.down.forward(model.up.forward(x)).sum();
    let grads = GradientsParams::from_grads(loss.backward(), &model);
    MuonConfig::new().init().step(1e-2, model, grads);
}

/// Without shards too, gradients of a divided linear are a rank's part.
pub fn muon_on_parts() {
    let plan = vec![("up".into(), TensorStyle::Colwise), ("down".into(), TensorStyle::Rowwise)];
    let model = TensorParallel::apply(two(), &world(), &plan).unwrap().0;
    let x = Tensor::<B, 2>::ones([16, 64], &Default::default());
    let loss = model.down.forward(model.up.forward(x)).sum();
    let grads = GradientsParams::from_grads(loss.backward(), &model);
    MuonConfig::new().init().step(1e-2, model, grads);
}

/// The embedding's table is also the weight of an output layer.
pub fn matmul_with_a_shard() {
    let embedding = sharded_embedding();
    let x = embedding.forward(Tensor::from_ints([[1, 2, 3]], &Default::default()));
    x.reshape([3, 40]).matmul(embedding.weight.val().transpose());
}

pub fn full_tensor_of_a_transpose() {
    full_tensor(sharded_embedding().weight.val().transpose());
}

fn sharded_embedding() -> Embedding<B> {
    shard(model(Recipe::Tensorwise)).unwrap().0.embedding
}

#[derive(Module, Debug)]
struct Two<B: Backend> {
    up: Linear<B>,
    down: Linear<B>,
}

fn two() -> Two<B> {
    B::seed(&Default::default(), 1);
    // Linears without bias, as Muon accepts only matrices.
    let new = || LinearConfig::new(64, 64).with_bias(false).init::<B>(&Default::default());
    Float8Config::tensorwise().apply(Two { up: new(), down: new() }).unwrap().0
}

pub fn ranks_that_differ() {
    let (model, _) = shard(two()).unwrap();
    let x = Tensor::<B, 2>::ones([4, 64], &Default::default());
    match world().rank() {
        0 => model.down.forward(model.up.forward(x)),
        _ => model.up.forward(model.down.forward(x)),
    };
}
