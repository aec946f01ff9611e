//! Frozen teachers, targets and layers: no weight gradient, but still an amax history.
use burn::module::{AutodiffModule, Module};
use burn::tensor::{Tensor, TensorData};
use burn_float8::{Float8Config, Float8State, Recipe, StatisticsConfig, without_float8};

use crate::programs::support::models::{D, Mlp};
use crate::programs::support::{
    B, F8, applied, float8_calls, layer_of, own_report, tensor, train, trained, values, with_parameters,
};

fn x(seed: u64) -> Tensor<B, 2> {
    tensor([6, D], seed)
}

/// The student learns as if given only the teacher's outputs: its gradients follow its own recipe.
#[test]
fn a_student_learns_as_it_would_alone() {
    const STEPS: u64 = 6;
    let run = |beside: bool| {
        let teacher = applied(&Float8Config::new(Recipe::Rowwise), Mlp::<B>::new().no_grad());
        let outputs = [0, 1].map(|seed| values(teacher.forward(x(seed))));
        let student: Mlp<B> = with_parameters(Mlp::new(), 7);
        let student = Float8Config::new(Recipe::Delayed).apply(student).unwrap().0;
        let (student, losses) = train(student, 0..STEPS, |m, step| {
            let x = x(step % 2);
            let y = m.forward(x.clone());
            let data = TensorData::new(outputs[(step % 2) as usize].clone(), [6, 4]);
            let target = if beside { teacher.forward(x) } else { Tensor::from_data(data, &Default::default()) };
            (y - target).powf_scalar(2.0).mean()
        });
        (losses, Float8State::export(&student))
    };
    assert_eq!(run(true), run(false));
}

/// Largest x of the steps before `step`, if step `i` has `x(i) · (i + 1)`.
fn largest_before(step: u64) -> f32 {
    (0..step).map(|i| (x(i) * (i + 1) as f32).abs().max().into_scalar()).fold(0.0, f32::max)
}

/// A frozen first linear, which no backward reaches, still has a history. It reads x before the
/// first new weight begins the step, so its scale is one step older.
#[test]
fn frozen_bottoms_have_histories() {
    const STEPS: u64 = 6;
    let mut model: Mlp<B> = Mlp::new();
    model.first = model.first.no_grad();
    let model = applied(&Float8Config::new(Recipe::Delayed), model);
    let (model, _) = train(model, 0..STEPS, |m, step| m.forward(x(step) * (1.0 + step as f32)).powf_scalar(2.0).mean());
    let first = layer_of(&model, "first");
    assert_eq!(float8_calls(&first), [STEPS, 0, 0]);
    let state = Float8State::export(&model);
    assert_eq!(state.step, STEPS);
    let history = &state.layers["first"].input.as_ref().expect("a history of x").history;
    assert_eq!(history.iter().filter(|amax| **amax > 0).count() as u64, STEPS - 1, "the last step is not over");
    let input = &first.fprop.operands[0];
    assert_eq!(input.amax, Some((x(STEPS - 1) * STEPS as f32).abs().max().into_scalar()));
    assert_eq!(input.scale, Some(448.0 / largest_before(STEPS - 2)));
}

/// A layer that is frozen later continues its history, with and without a dgrad. Without one, its
/// scale is a step older.
#[test]
fn bottoms_that_are_frozen_later_keep_their_histories() {
    for is_tracked in [false, true] {
        let loss = |m: &Mlp<B>, step: u64| {
            let x = (x(step) * (1.0 + step as f32)).set_require_grad(is_tracked);
            m.forward(x).powf_scalar(2.0).mean()
        };
        let (mut model, _) = train(applied(&Float8Config::new(Recipe::Delayed), Mlp::new()), 0..3, loss);
        assert!(Float8State::export(&model).layers["first"].input.is_some());
        model.first = model.first.no_grad();
        let (model, _) = train(model, 3..6, loss);
        let input = layer_of(&model, "first").fprop.operands[0].clone();
        assert_eq!(input.amax, Some((x(5) * 6.0).abs().max().into_scalar()));
        let scales = [4, 5].map(|step| Some(448.0 / largest_before(step)));
        let is_known = if is_tracked { scales.contains(&input.scale) } else { input.scale == scales[0] };
        assert!(is_known, "{is_tracked}: {:?}, not of {scales:?}", input.scale);
    }
}

/// A teacher takes no statistics, as no backward reaches it.
#[test]
fn a_teacher_is_not_sampled() {
    let config = Float8Config::tensorwise().with_statistics(StatisticsConfig::every(1));
    let teacher = applied(&config, Mlp::<B>::new().no_grad());
    let student: Mlp<B> = applied(&config, Mlp::new());
    let (student, _) =
        train(student, 0..3, |m, step| (m.forward(x(step)) - teacher.forward(x(step))).powf_scalar(2.0).mean());
    let sampled = |m: &Mlp<B>| {
        let operands = own_report(m).layers.into_iter().flat_map(|l| [l.fprop, l.dgrad, l.wgrad]);
        operands.flat_map(|gemm| gemm.operands).filter(|operand| operand.health.is_some()).count()
    };
    assert_eq!(sampled(&teacher), 0);
    assert!(sampled(&student) > 0, "the test can fail");
}

/// `apply` and `without_float8` on a model without autodiff do not change which parameters train
/// later.
#[test]
fn below_autodiff_parameters_stay_trained_or_frozen() {
    let new = Float8Config::tensorwise().apply(Mlp::<F8>::new()).unwrap().0;
    assert_eq!(trained(&new.train::<B>()), [true; 4]);
    let mut model: Mlp<B> = applied(&Float8Config::tensorwise(), Mlp::new());
    model.first = model.first.no_grad();
    let applied_again = Float8Config::new(Recipe::Rowwise).apply(model.valid()).unwrap().0;
    for valid in [applied_again, without_float8(model.valid())] {
        assert_eq!(trained(&valid.train::<B>()), [false, false, true, true]);
    }
}
