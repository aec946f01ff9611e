//! Contents of a saved state of delayed scaling, and their effect when restored.
use burn::module::{AutodiffModule, Module};
use burn::nn::Linear;
use burn::tensor::Tensor;
use burn_float8::config::{CastConfig, Casts, Format, Granularity, Operand};
use burn_float8::report::{Gemm, LayerState};
use burn_float8::{Float8Config, Float8LinearConfig, Float8State, Recipe};

use crate::support::linear::{A, layer};
use crate::support::model::{Model, input};
use crate::support::operand::{tensor, values};
use crate::support::runtime::Flex;
use crate::support::{mean_square, normal, updated};

type B = A<Flex>;

const M: usize = 6;
const K: usize = 20;
const N: usize = 12;

fn linear(casts: Casts) -> Linear<B> {
    let config = Float8LinearConfig::new(Recipe::Delayed).with_casts(casts);
    layer::<Flex>(&config.into(), tensor(normal(K * N, 3), [K, N]), None)
}

/// Forward and backward, with x and dy multiplied by these factors.
fn run(linear: &Linear<B>, [fx, fdy]: [f32; 2]) {
    let x = tensor::<B, 2>(normal(M * K, 1), [M, K]) * fx;
    let dy = tensor::<B, 2>(normal(M * N, 2), [M, N]) * fdy;
    (linear.forward(x.require_grad()) * dy).sum().backward();
}

/// The model after an update, and the state after the step has ended.
fn ended(linear: Linear<B>) -> (Linear<B>, LayerState) {
    let linear = updated(linear);
    let state = state(&linear);
    (linear, state)
}

/// Ends the step of the previous weights and returns the state.
fn state(linear: &Linear<B>) -> LayerState {
    linear.valid().forward(tensor(normal(M * K, 1), [M, K]));
    Float8State::export(linear).layers.remove("linear").unwrap()
}

/// Casts that only fprop or only wgrad delays have histories too.
#[test]
fn every_delayed_cast_has_a_history() {
    let delayed = Recipe::Delayed.casts();
    let dynamic = CastConfig::dynamic(Granularity::Tensor, Format::E4m3);
    let mixed = [Operand::INPUT_T, Operand::INPUT].map(|operand| delayed.with(operand, dynamic));
    for casts in mixed.into_iter().chain([delayed, delayed.without(Gemm::Wgrad)]) {
        let linear = linear(casts);
        run(&linear, [1.0, 1.0]);
        let state = Float8State::export(&linear).layers.remove("linear").unwrap();
        assert!(state.input.is_some() && state.weight.is_some() && state.grad_output.is_some(), "{casts:?}");
    }
}

#[test]
fn a_step_of_zeros_leaves_the_history_as_it_is() {
    let linear = linear(Recipe::Delayed.casts());
    run(&linear, [1.0, 1.0]);
    let (linear, before) = ended(linear);
    run(&linear, [0.0, 0.0]);
    let (linear, after) = ended(linear);
    assert_eq!((&after.input, &after.grad_output), (&before.input, &before.grad_output));
    assert_ne!(after.weight, before.weight);
    run(&linear, [3.0, 3.0]);
    let (_, later) = ended(linear);
    assert!(later.input != before.input && later.grad_output != before.grad_output);
}

/// A cast whose first step had only zeros has a scale of 1, even if that step was saved before it
/// ended.
///
/// The scale belongs to the format of the active cast, not of the disabled one.
#[test]
fn first_steps_of_zeros_resume_with_a_scale_of_one() {
    let casts = Recipe::Delayed.casts().without(Gemm::Dgrad);
    let original = linear(casts);
    run(&original, [1.0, 0.0]);
    let original = updated(original);
    let saved = Float8State::export(&original);
    assert_eq!(saved.layers["linear"].grad_output.as_ref().unwrap().scaling_amax, None);
    let resumed = linear(casts).load_record(original.clone().into_record());
    saved.restore(&resumed).unwrap();
    for linear in [original, resumed] {
        assert_eq!(state(&linear).grad_output.unwrap().scaling_amax, Some(57344f32.to_bits()));
    }
}

/// Layers in their first step, saved with a layer that has a history, continue as without the save.
#[test]
fn casts_without_a_history_resume_beside_others() {
    let new = || Float8Config::new(Recipe::Delayed).apply(Model::<B>::new(1)).unwrap().0;
    let x = |step: u64| input::<B>(step) * (1.0 + step as f32);
    let backward = |y: Tensor<B, 3>| drop(mean_square(y).backward());
    let model = new();
    // The first step skips everything except the head.
    backward(model.head.forward(x(0)));
    let model = updated(model);
    backward(model.forward(x(1)));
    let model = updated(model);
    let saved = Float8State::export(&model);
    let has_scale = |name: &str| saved.layers[name].input.as_ref().unwrap().scaling_amax.is_some();
    assert_eq!(["blocks.0.q", "head"].map(has_scale), [false, true]);
    let resumed = new().load_record(model.clone().into_record());
    let saved: Float8State = serde_json::from_str(&serde_json::to_string(&saved).unwrap()).unwrap();
    saved.restore(&resumed).unwrap();
    let go_on = |model: Model<B>| {
        let y = model.forward(x(2));
        let bits: Vec<_> = values(y.clone()).into_iter().map(f32::to_bits).collect();
        backward(y);
        let model = updated(model);
        model.valid().forward(input(3));
        (bits, Float8State::export(&model))
    };
    assert!(go_on(resumed) == go_on(model));
}
