//! Precision switches within a run: exact, and without rebuilding anything.
use std::ops::Range;

use burn::module::Module;
use burn::optim::{AdamWConfig, GradientsParams, Optimizer};
use burn_float8::{Float8Config, PrecisionSchedule, Recipe, Span, report, set_float8_enabled};

use crate::support::linear::A;
use crate::support::model::{Model, input};
use crate::support::operand::values;
use crate::support::runtime::Flex;
use crate::support::{mean_square, verify};

type B = A<Flex>;

/// Runs some of 8 steps. Returns the updated model and the bits of the losses.
fn run(
    mut model: Model<B>,
    optimizer: &mut impl Optimizer<Model<B>, B>,
    steps: Range<u64>,
    schedule: PrecisionSchedule,
) -> (Model<B>, Vec<u32>) {
    let mut losses = vec![];
    for step in steps {
        set_float8_enabled(&model, schedule.is_float8(step, 8));
        let loss = mean_square(model.forward(input(step)));
        losses.push(values(loss.clone())[0].to_bits());
        let grads = GradientsParams::from_grads(loss.backward(), &model);
        model = optimizer.step(1e-2, model, grads);
    }
    (model, losses)
}

#[test]
fn the_first_fp8_step_is_that_of_an_fp8_run() {
    for recipe in [Recipe::Tensorwise, Recipe::RowwiseWithGwHp, Recipe::Delayed, Recipe::Mxfp8] {
        let new = || Float8Config::new(recipe).apply(Model::<B>::new(1)).unwrap().0;
        let mut optimizer = AdamWConfig::new().init::<B, Model<B>>();
        let schedule = PrecisionSchedule::new(Span::Steps(3), Span::Steps(2)).unwrap();
        let (model, _) = run(new(), &mut optimizer, 0..3, schedule);
        let (at_switch, record) = (model.clone().into_record(), optimizer.to_record());
        let (model, losses) = run(model, &mut optimizer, 3..8, schedule);
        verify(report(&model)).unwrap();
        // A run that was always in FP8, from the same parameters and optimizer state.
        let mut optimizer = AdamWConfig::new().init::<B, Model<B>>().load_record(record);
        let (_, fp8) = run(new().load_record(at_switch), &mut optimizer, 3..6, PrecisionSchedule::default());
        assert_eq!(fp8, losses[..3], "{recipe}");
    }
}

#[test]
fn spans_are_steps_or_fractions() {
    let of = |warmup, cooldown| PrecisionSchedule::new(warmup, cooldown).unwrap();
    let steps = |s: PrecisionSchedule, total| (0..total).filter(|i| s.is_float8(*i, total)).collect::<Vec<_>>();
    assert_eq!(steps(PrecisionSchedule::default(), 3), [0, 1, 2]);
    assert_eq!(steps(of(Span::Steps(1), Span::Fraction(0.25)), 8), [1, 2, 3, 4, 5]);
    assert_eq!(steps(of(Span::Fraction(0.5), Span::Steps(0)), 5), [3, 4]);
    assert!(steps(of(Span::Steps(9), Span::Steps(9)), 8).is_empty());
    assert!(steps(of(Span::Fraction(0.5), Span::Fraction(0.5)), 8).is_empty(), "as was asked for");
    let parsed: PrecisionSchedule = serde_json::from_str(r#"{"warmup": 5, "cooldown": 0.5}"#).unwrap();
    assert_eq!(parsed, of(Span::Steps(5), Span::Fraction(0.5)));
}
