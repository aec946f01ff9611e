//! Precision switches within a run: exact, and without rebuilding anything.
use burn::backend::Autodiff;
use burn::module::Module;
use burn::optim::{AdamWConfig, GradientsParams, Optimizer};
use burn_float8::{Float8, Float8Config, PrecisionSchedule, Recipe, Span, report, set_float8_enabled};

use crate::support::model::{Model, input};
use crate::support::operand::values;
use crate::support::runtime::Flex;
use crate::support::{mean_square, verify};

type B = Float8<Autodiff<Flex>>;

/// One step. Returns the updated model and the bits of the loss.
fn step(model: Model<B>, optimizer: &mut impl Optimizer<Model<B>, B>, seed: u64) -> (Model<B>, u32) {
    let loss = mean_square(model.forward(input(seed)));
    let grads = GradientsParams::from_grads(loss.backward(), &model);
    (optimizer.step(1e-2, model, grads), values(loss)[0].to_bits())
}

#[test]
fn the_first_fp8_step_is_that_of_an_fp8_run() {
    for recipe in [Recipe::Tensorwise, Recipe::RowwiseWithGwHp, Recipe::Delayed, Recipe::Mxfp8] {
        let new = || Float8Config::new(recipe).apply(Model::<B>::new(1)).unwrap().0;
        let mut optimizer = AdamWConfig::new().init::<B, Model<B>>();
        let schedule = PrecisionSchedule::new(Span::Steps(3), Span::Steps(2)).unwrap();
        let (mut model, mut losses) = (new(), vec![]);
        let mut at_switch = None;
        for i in 0..8 {
            set_float8_enabled(&model, schedule.is_float8(i, 8));
            if i == 3 {
                at_switch = Some((model.clone(), optimizer.to_record()));
            }
            let loss;
            (model, loss) = step(model, &mut optimizer, i);
            losses.push(loss);
        }
        let layers = report(&model).layers;
        for layer in layers.iter().filter(|l| l.is_float8 && l.name != burn_float8::report::UNTAGGED_NAME) {
            let [float8, high] = [layer.fprop.emulated, layer.fprop.high_precision];
            assert_eq!([float8, high], [3, 5], "{recipe} {}", layer.name);
            assert_eq!(layer.fprop.reason.as_deref(), Some("precision schedule"));
        }
        verify(report(&model)).unwrap();

        // A run that was always in FP8, from the same parameters and optimizer state.
        let (model, record) = at_switch.unwrap();
        let mut fp8 = new().load_record(model.into_record());
        let mut optimizer = AdamWConfig::new().init::<B, Model<B>>().load_record(record);
        for i in 3..6 {
            let loss;
            (fp8, loss) = step(fp8, &mut optimizer, i);
            assert_eq!(loss, losses[i as usize], "{recipe} step {i}");
        }
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
