//! Errors and panics of ranks.
use std::time::Duration;

use burn::module::{Module, ModuleMapper, Param};
use burn::nn::{Embedding, LayerNormConfig, Linear, LinearConfig};
use burn::optim::{GradientsParams, MuonConfig, Optimizer};
use burn::prelude::*;
use burn::tensor::DType;
use burn_float8::{Float8Config, Float8LinearConfig, Recipe, StatisticsConfig, config::DelayedScaling};
use float8_shard::{ShardConfig, Sharded, full_tensor};
use ranks::{B, Net, VOCABULARY, model};

use super::world;

fn linear(k: usize) -> Linear<B> {
    B::seed(&Default::default(), 1);
    Float8Config::tensorwise().apply(LinearConfig::new(k, 32).init(&Default::default())).unwrap().0
}

pub fn models_that_differ_are_refused() {
    let comm = world();
    let refused = Sharded::apply(linear(64 + comm.rank()), &comm, ShardConfig::default()).unwrap_err();
    let error = refused.error.to_string();
    assert!(error.contains("[64, 32]") && error.contains("[65, 32]") && error.contains("rank 1"), "{error}");
    // The ranks continue together.
    Sharded::apply(linear(64), &comm, ShardConfig::default()).unwrap();
}

/// Models of equal shapes whose exchanges differ in content or order.
pub fn ranks_that_would_part_are_refused() {
    let comm = world();
    let is_odd = comm.rank() % 2 == 1;
    let tensorwise = Float8Config::tensorwise;
    let margin = |margin| {
        let scaling = DelayedScaling { margin, ..DelayedScaling::default() };
        Float8Config::new(Recipe::Delayed)
            .with_override(["*"], Float8LinearConfig::new(Recipe::Delayed).with_delayed_scaling(scaling))
    };
    let statistics = |every| tensorwise().with_statistics(StatisticsConfig::every(every));
    let refused = |model: Net<B>, what: &str| {
        let error = Sharded::apply(model, &comm, ShardConfig::default()).unwrap_err().error.to_string();
        assert!(error.contains(what) && error.contains("rank 1"), "{error}");
    };
    let configured = |config: Float8Config| config.apply(Net::new(&Default::default())).unwrap().0;
    refused(configured(margin(if is_odd { 1 } else { 0 })), "margin");
    refused(configured(statistics(if is_odd { 3 } else { 1 })), "every_n_steps");
    let frozen = configured(tensorwise());
    refused(if is_odd { frozen.no_grad() } else { frozen }, "gradient: false");
    let other = configured(tensorwise());
    refused(if is_odd { other.map(&mut Changed) } else { other }, "the first values of parameters");
    let cast = configured(tensorwise());
    refused(if is_odd { cast.map(&mut Bf16) } else { cast }, "BF16");
    Sharded::apply(configured(tensorwise()), &comm, ShardConfig::default()).unwrap();
}

/// Casts embeddings to another dtype.
struct Bf16;

impl ModuleMapper<B> for Bf16 {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<B, D>>) -> Param<Tensor<B, D>> {
        param.map(|t| if t.dims()[0] == VOCABULARY { t.cast(DType::BF16).detach().require_grad() } else { t })
    }
}

pub fn record_of_another_shape() {
    let (model, _) = Sharded::apply(linear(64), &world(), ShardConfig::default()).unwrap();
    model.load_record(linear(48).into_record()).forward(Tensor::<B, 2>::ones([4, 64], &Default::default()));
}

/// Rank 0 runs an extra forward without the other ranks.
pub fn a_step_of_one_rank_alone() {
    let comm = world();
    let (model, sharded) = Sharded::apply(two(), &comm, ShardConfig::default()).unwrap();
    let forward = || model.down.forward(model.up.forward(Tensor::<B, 2>::ones([4, 64], &Default::default())));
    if comm.rank() == 0 {
        forward();
    }
    for _ in 0..2 {
        sharded.precompute_scales(&model);
        let mut grads = GradientsParams::from_grads(forward().sum().backward(), &model);
        sharded.reduce_gradients(&model, &mut grads).unwrap();
    }
}

pub fn what_cannot_be_sharded_is_refused() {
    let comm = world();
    let (model, _) = Sharded::apply(linear(64), &comm, ShardConfig::default()).unwrap();
    let again = Sharded::apply(model, &comm, ShardConfig::default()).unwrap_err().error.to_string();
    assert!(again.contains("linear is sharded already"), "{again}");
    let norm = LayerNormConfig::new(8).init::<B>(&Default::default());
    let nothing = Sharded::apply(norm, &comm, ShardConfig::default()).unwrap_err().error.to_string();
    assert!(nothing.contains("there is nothing to shard"), "{nothing}");
}

/// Muon multiplies gradients, which is not element-wise.
pub fn muon() {
    let (model, _) = Sharded::apply(two(), &world(), ShardConfig::default()).unwrap();
    let x = Tensor::<B, 2>::ones([4, 64], &Default::default());
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
    Sharded::apply(model(Recipe::Tensorwise), &world(), ShardConfig::default()).unwrap().0.embedding
}

pub fn a_rank_that_sleeps() {
    let comm = world();
    let (model, _) = Sharded::apply(linear(64), &comm, ShardConfig::default()).unwrap();
    model.forward(Tensor::<B, 2>::ones([4, 64], &Default::default()));
    if comm.rank() == 1 {
        std::thread::sleep(Duration::from_secs(60));
    }
    let changed = model.map(&mut Changed);
    changed.forward(Tensor::<B, 2>::ones([4, 64], &Default::default()));
}

/// Changes values like an optimizer step.
struct Changed;

impl ModuleMapper<B> for Changed {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<B, D>>) -> Param<Tensor<B, D>> {
        param.map(|t| (t * 0.5).detach().require_grad())
    }
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
    let comm = world();
    let (model, _) = Sharded::apply(two(), &comm, ShardConfig::default()).unwrap();
    let x = Tensor::<B, 2>::ones([4, 64], &Default::default());
    match comm.rank() {
        0 => model.down.forward(model.up.forward(x)),
        _ => model.up.forward(model.down.forward(x)),
    };
}
