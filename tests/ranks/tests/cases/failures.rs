//! What ranks say when they cannot go on.
use std::time::Duration;

use burn::module::Module;
use burn::nn::{Embedding, EmbeddingConfig, LayerNormConfig, LinearConfig};
use burn::optim::{GradientsParams, MuonConfig, Optimizer};
use burn::prelude::*;
use burn_float8::{Float8Config, ShardConfig, ShardError, Sharded, full_tensor};
use ranks::B;

use super::world;

fn linear(k: usize) -> burn::nn::Linear<B> {
    Float8Config::tensorwise().apply(LinearConfig::new(k, 32).init(&Default::default())).unwrap()
}

pub fn models_that_differ_are_refused() {
    let comm = world();
    let refused = Sharded::apply(linear(64 + comm.rank()), &comm, ShardConfig::default()).unwrap_err();
    let error = refused.error.to_string();
    assert!(error.contains("[64, 32]") && error.contains("[65, 32]") && error.contains("rank 1"), "{error}");
    // The ranks go on together.
    Sharded::apply(linear(64), &comm, ShardConfig::default()).unwrap();
}

pub fn what_cannot_be_sharded_is_refused() {
    let comm = world();
    let (model, _) = Sharded::apply(linear(64), &comm, ShardConfig::default()).unwrap();
    let again = Sharded::apply(model, &comm, ShardConfig::default()).unwrap_err().error.to_string();
    assert!(again.contains("linear is sharded already"), "{again}");
    let norm = LayerNormConfig::new(8).init::<B>(&Default::default());
    let nothing = Sharded::apply(norm, &comm, ShardConfig::default()).unwrap_err().error.to_string();
    assert!(nothing.contains(&ShardError::NothingToShard.to_string()), "{nothing}");
}

/// An optimizer that multiplies gradients.
pub fn muon() {
    let (model, _) = Sharded::apply(two(), &world(), ShardConfig::default()).unwrap();
    let x = Tensor::<B, 2>::ones([4, 64], &Default::default());
    let loss = model.down.forward(model.up.forward(x)).sum();
    let grads = GradientsParams::from_grads(loss.backward(), &model);
    MuonConfig::new().init().step(1e-2, model, grads);
}

/// The table of an embedding is an output layer's weight too.
pub fn matmul_with_a_shard() {
    let embedding = sharded_embedding();
    let x = embedding.forward(Tensor::from_ints([[1, 2, 3]], &Default::default()));
    x.reshape([3, 40]).matmul(embedding.weight.val().transpose());
}

pub fn full_tensor_of_a_transpose() {
    full_tensor(sharded_embedding().weight.val().transpose());
}

fn sharded_embedding() -> Embedding<B> {
    let model = WithEmbedding { embedding: EmbeddingConfig::new(48, 40).init::<B>(&Default::default()) };
    Sharded::apply(model, &world(), ShardConfig::default()).unwrap().0.embedding
}

#[derive(Module, Debug)]
struct WithEmbedding<B: Backend> {
    embedding: Embedding<B>,
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

/// Another value, as after a step of an optimizer.
struct Changed;

impl burn::module::ModuleMapper<B> for Changed {
    fn map_float<const D: usize>(
        &mut self,
        param: burn::module::Param<Tensor<B, D>>,
    ) -> burn::module::Param<Tensor<B, D>> {
        param.map(|t| t.mul_scalar(0.5))
    }
}

#[derive(Module, Debug)]
struct Two<B: Backend> {
    up: burn::nn::Linear<B>,
    down: burn::nn::Linear<B>,
}

fn two() -> Two<B> {
    // Of linears without a bias, which Muon does not take.
    let new = || LinearConfig::new(64, 64).with_bias(false).init::<B>(&Default::default());
    Float8Config::tensorwise().apply(Two { up: new(), down: new() }).unwrap()
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
