//! A panic inside a linear poisons nothing: the next call works, on the same thread and on others.
use burn::backend::{Autodiff, Flex};
use burn::nn::LinearConfig;
use burn::tensor::{DType, Tensor};
use burn_float8::{Float8, Float8Config, Float8State, Recipe, StatisticsConfig, grouped_linear};

use crate::programs::support::models::{D, Mlp};
use crate::programs::support::{B, applied, assert_falls, layer_of, panic_of, tensor, to_target, train, x};

/// Trains with panics from `interrupt`, and expects the results of a run without it.
fn survives(recipe: Recipe, interrupt: fn(&Mlp<B>)) {
    let config = Float8Config::new(recipe).with_strict(true).with_statistics(StatisticsConfig::every(1));
    let run = |disturb: &dyn Fn(&Mlp<B>)| {
        let model: Mlp<B> = applied(&config, Mlp::new());
        // Before forward, and between forward and backward.
        let (model, losses) = train(model, 0..12, |m, step| {
            disturb(m);
            let loss = to_target(m.forward(x(step % 2)));
            disturb(m);
            loss
        });
        assert_falls(&losses);
        let losses: Vec<_> = losses.into_iter().map(f32::to_bits).collect();
        (losses, Float8State::export(&model), layer_of(&model, "second").fprop.emulated)
    };
    let disturbed = run(&|m| {
        panic_of(|| interrupt(m));
        let copy = m.clone();
        assert!(std::thread::spawn(move || interrupt(&copy)).join().is_err());
    });
    assert_eq!(disturbed, run(&|_| ()), "{recipe}");
}

#[test]
fn strict_panics_and_wrong_shapes() {
    for recipe in [Recipe::Delayed, Recipe::Tensorwise, Recipe::Rowwise] {
        survives(recipe, |m| drop(m.second.forward(tensor::<B, 2>([6, 2 * D], 3).cast(DType::F64))));
        survives(recipe, |m| drop(m.first.forward(tensor::<B, 2>([6, D + 1], 3))));
    }
}

/// The wrong order of wrappers panics in the first backward, if no `apply` has failed to compile.
#[test]
fn the_other_order() {
    type Wrong = Autodiff<Float8<Flex>>;
    for bias in [true, false] {
        let linear = LinearConfig::new(D, D).with_bias(bias).init::<Wrong>(&Default::default());
        let y = linear.forward(tensor::<Wrong, 2>([6, D], 1));
        let message = panic_of(|| drop(y.sum().backward()));
        assert!(message.contains("write `Float8<Autodiff<B>>` in place of `Autodiff<Float8<B>>`"), "{message}");
    }
    let ends = Tensor::from_ints([2, 6], &Default::default());
    let message = panic_of(|| drop(grouped_linear(tensor::<Wrong, 2>([6, D], 1), tensor([2, D, D], 2), ends)));
    assert!(message.contains("Float8 wraps the backend that you train with"), "{message}");
}
