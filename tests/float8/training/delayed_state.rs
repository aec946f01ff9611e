//! Contents of a saved state of delayed scaling, and their effect when restored.
use burn::backend::Autodiff;
use burn::module::{AutodiffModule, Module};
use burn::nn::{Linear, LinearConfig};
use burn::tensor::Tensor;
use burn_float8::{
    Float8, Float8Config, Float8Error, Float8LinearConfig, Float8State, Recipe,
    config::{CastConfig, Casts, Format, Granularity, Operand},
    report,
    report::{Gemm, LayerState},
};

use crate::support::model::{Model, input};
use crate::support::operand::{tensor, values};
use crate::support::runtime::Flex;
use crate::support::{mean_square, normal, updated};

type A = Float8<Autodiff<Flex>>;

const M: usize = 6;
const K: usize = 20;
const N: usize = 12;

fn linear(casts: Casts) -> Linear<A> {
    let linear: Linear<A> = LinearConfig::new(K, N).with_bias(false).init(&Default::default());
    // Draws the weight. Clones would each draw another one.
    linear.weight.val();
    Float8Config::from(Float8LinearConfig::new(Recipe::Delayed).with_casts(casts)).apply(linear).unwrap().0
}

/// Forward and backward, with x and dy multiplied by these factors.
fn run(linear: &Linear<A>, [fx, fdy]: [f32; 2]) {
    let x = tensor::<A, 2>(normal(M * K, 1), [M, K]) * fx;
    let dy = tensor::<A, 2>(normal(M * N, 2), [M, N]) * fdy;
    (linear.forward(x.require_grad()) * dy).sum().backward();
}

/// The model after an update, and the state after the step has ended.
fn ended(linear: Linear<A>) -> (Linear<A>, LayerState) {
    let linear = updated(linear);
    let state = state(&linear);
    (linear, state)
}

/// Ends the step of the previous weights and returns the state.
fn state(linear: &Linear<A>) -> LayerState {
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

#[test]
fn the_reports_scale_is_that_of_the_history() {
    let linear = linear(Recipe::Delayed.casts());
    let x = &|model: &Linear<A>| report(model).layers[0].fprop.operands[0].clone();
    run(&linear, [1.0, 1.0]);
    let first = x(&linear).amax.unwrap();
    let linear = updated(linear);
    run(&linear, [8.0, 1.0]);
    assert_eq!((x(&linear).amax, x(&linear).scale), (Some(8.0 * first), Some(448.0 / first)));
}

#[test]
fn a_saved_amax_that_no_scale_can_be_made_of_is_refused() {
    let linear = linear(Recipe::Delayed.casts());
    run(&linear, [1.0, 1.0]);
    let (linear, _) = ended(linear);
    let state = Float8State::export(&linear);
    for (bits, text) in [(0, "0"), (1 << 31, "-0")] {
        let mut broken = state.clone();
        broken.layers.get_mut("linear").unwrap().input.as_mut().unwrap().scaling_amax = Some(bits);
        let error = broken.restore(&linear).unwrap_err();
        let what = format!("an amax of input is {text}");
        assert_eq!(error, Float8Error::State { layer: "linear".into(), what });
    }
    state.restore(&linear).unwrap();
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
    let new = || Float8Config::new(Recipe::Delayed).apply(Model::<A>::new(1)).unwrap().0;
    let x = |step: u64| input::<A>(step) * (1.0 + step as f32);
    let backward = |y: Tensor<A, 3>| drop(mean_square(y).backward());
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
    let go_on = |model: Model<A>| {
        let y = model.forward(x(2));
        let bits: Vec<_> = values(y.clone()).into_iter().map(f32::to_bits).collect();
        backward(y);
        let model = updated(model);
        model.valid().forward(input(3));
        (bits, Float8State::export(&model))
    };
    assert!(go_on(resumed) == go_on(model));
}

/// A layer that the last step left out has an outdated history: its own amax sets the scale.
#[test]
fn a_layer_that_returns_is_scaled_by_its_own_amax() {
    let mut model = Float8Config::new(Recipe::Delayed).apply(Model::<A>::new(1)).unwrap().0;
    let x = |step: u64| input::<A>(step) * (1.0 + step as f32);
    let scale_of = |step| Some(448.0 / x(step).abs().max().into_scalar());
    for (step, expected) in [(0, Some(0)), (1, Some(0)), (2, None), (3, Some(3))] {
        let y = if expected.is_some() { model.forward(x(step)) } else { model.head.forward(x(step)) };
        mean_square(y).backward();
        let layers = report(&model).layers;
        let q = layers.iter().find(|layer| layer.name == "blocks.0.q").unwrap();
        if let Some(expected) = expected {
            assert_eq!(q.fprop.operands[0].scale, scale_of(expected), "step {step}");
        }
        model = updated(model);
    }
}
