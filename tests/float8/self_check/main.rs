//! Faults of a device are found and worked around, or end in an error, but never in wrong numbers.
//!
//! Runs in its own process, since panics of device threads affect the whole process.
mod cuda;
#[allow(dead_code)]
#[path = "../support/mod.rs"]
mod support;

use burn::backend::Flex;
use burn::module::{Param, ParamId};
use burn::nn::Linear;
use burn::tensor::{DType, Int, Tensor, TensorData};
use burn_float8::backend::Float8Backend;
use burn_float8::report::Gemm;
use burn_float8::{Float8Config, Float8Error, GroupedLinear, Recipe, Report, float8_autocast, report};
use test_data::{normal, relative_error};

use crate::support::linear::{A, forward_backward};
use crate::support::operand::values;

/// M, K and N: one past tiles, and no multiples of 16. Rows of 16-bit values are whole 16 bytes.
const SHAPE: [usize; 3] = [129, 264, 72];

/// On CUDA Burn multiplies f32 in TF32.
const TF32: f64 = 1e-3;

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

/// y, dx, dw and db in bf16, and the report.
fn step_in_bf16<B: Float8Backend>(recipe: Recipe, device: &B::Device) -> (Vec<Vec<f32>>, Report) {
    let ([m, k, n], Linear { weight, bias }) = (SHAPE, plain::<B>(device));
    let weight = weight.map(|w| w.detach().cast(DType::BF16).detach().require_grad());
    let bias = bias.map(|bias| bias.map(|b| b.detach().cast(DType::BF16).detach().require_grad()));
    let (layer, _) = Float8Config::new(recipe).apply(Linear { weight, bias }).expect("the device computes");
    let [x, dy] = [(1, k), (4, n)].map(|(seed, cols)| tensor::<B, 2>(seed, [m, cols], device).cast(DType::BF16));
    (forward_backward::<B, 2>(&layer, x, dy), report(&layer))
}

/// y, dx and dw of experts, and their report. One group is empty, and some rows are in none.
fn experts<B: Float8Backend>(recipe: Recipe, device: &B::Device) -> (Vec<Vec<f32>>, Report) {
    let [m, k, n] = SHAPE;
    let weight = Param::initialized(ParamId::new(), tensor::<B, 3>(2, [3, k, n], device).require_grad());
    let (experts, _) = Float8Config::new(recipe).apply(GroupedLinear { weight }).expect("the device computes");
    let x = tensor::<B, 2>(1, [m, k], device).require_grad();
    let y = experts.forward(x.clone(), Tensor::<A<B>, 1, Int>::from_ints([50, 50, 120], device));
    let grads = (y.clone() * tensor::<B, 2>(4, [m, n], device)).sum().backward();
    let [dx, dw] = [x.grad(&grads).map(values), experts.weight.val().grad(&grads).map(values)];
    (vec![values(y), dx.expect("tracked"), dw.expect("tracked")], report(&experts))
}

/// Checks that a step matches the CPU.
fn assert_right<B: Float8Backend>(recipe: Recipe, layer: &Linear<A<B>>, device: &B::Device) {
    let cpu = Default::default();
    let want = step::<Flex>(&self::layer::<Flex>(&Float8Config::new(recipe), &cpu).expect("a CPU computes"), &cpu);
    let is_float8 = recipe.casts().without(Gemm::Wgrad) != recipe.casts();
    let got = step::<B>(layer, device);
    let of_dw = if is_float8 { 1e-5 } else { TF32 };
    assert_near(&got, &want, &format!("{recipe}"), [1e-5, 1e-5, of_dw, of_dw]);
}

/// Checks that a step runs in high precision, since no kernel is left.
fn assert_high_precision<B: Float8Backend>(layer: &Linear<A<B>>, device: &B::Device) {
    let cpu = Default::default();
    let want = float8_autocast(false, || step::<Flex>(&plain::<Flex>(&cpu), &cpu));
    assert_near(&step::<B>(layer, device), &want, "high precision", [TF32; 4]);
    for (gemm, calls) in report(layer).layers[0].gemms() {
        let reason = calls.unrequested.as_deref();
        assert_eq!(reason, Some("no kernel of the device is left: self-checks failed"), "{gemm}");
    }
}

fn assert_near(got: &[Vec<f32>], want: &[Vec<f32>], case: &str, bounds: [f64; 4]) {
    assert_eq!(got.len(), want.len(), "{case}");
    for (((what, got), want), bound) in ["y", "dx", "dw", "db"].iter().zip(got).zip(want).zip(bounds) {
        let error = relative_error(got, want);
        assert!(error < bound, "{what} in {case}: {error:e}");
    }
}
