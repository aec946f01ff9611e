//! Faults of a device are found and worked around, or end in an error, but never in wrong numbers.
//!
//! Runs in its own process, since panics of device threads affect the whole process.
mod cuda;
#[allow(dead_code)]
#[path = "../support/mod.rs"]
mod support;
mod wgpu;

use burn::backend::{Autodiff, Flex};
use burn::module::{Param, ParamId};
use burn::nn::Linear;
use burn::tensor::{Tensor, TensorData};
use burn_float8::backend::Float8Backend;
use burn_float8::{Float8, Float8Config, Float8Error, Recipe};
use test_data::{normal, relative_error};

use crate::support::linear::forward_backward;

type A<B> = Float8<Autodiff<B>>;

/// M, K and N.
const SHAPE: [usize; 3] = [128, 256, 192];

fn tensor<B: Float8Backend, const D: usize>(seed: u64, shape: [usize; D], device: &B::Device) -> Tensor<A<B>, D> {
    Tensor::from_data(TensorData::new(normal(shape.iter().product(), seed), shape), device)
}

/// A linear without an applied configuration.
fn plain<B: Float8Backend>(device: &B::Device) -> Linear<A<B>> {
    let [_, k, n] = SHAPE;
    let weight = Param::initialized(ParamId::new(), tensor::<B, 2>(2, [k, n], device).require_grad());
    Linear { weight, bias: Some(Param::initialized(ParamId::new(), tensor::<B, 1>(3, [n], device).require_grad())) }
}

fn layer<B: Float8Backend>(config: &Float8Config, device: &B::Device) -> Result<Linear<A<B>>, Float8Error> {
    Ok(config.apply(plain::<B>(device))?.0)
}

/// y, dx, dw and db.
fn step<B: Float8Backend>(layer: &Linear<A<B>>, device: &B::Device) -> Vec<Vec<f32>> {
    let [m, k, n] = SHAPE;
    forward_backward::<B, 2>(layer, tensor::<B, 2>(1, [m, k], device), tensor::<B, 2>(4, [m, n], device))
}

/// Checks that a step matches the CPU.
fn assert_right<B: Float8Backend>(recipe: Recipe, layer: &Linear<A<B>>, device: &B::Device) {
    let cpu = Default::default();
    let want = step::<Flex>(&self::layer::<Flex>(&Float8Config::new(recipe), &cpu).expect("a CPU computes"), &cpu);
    let got = step::<B>(layer, device);
    for ((what, got), want) in ["y", "dx", "dw", "db"].iter().zip(&got).zip(&want) {
        let error = relative_error(got, want);
        assert!(error < 1e-5, "{what} in {recipe}: {error:e}");
    }
}
