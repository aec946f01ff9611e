//! Frozen teachers, targets and layers: no weight gradient, but still an amax history.
use burn::module::{AutodiffModule, Module};
use burn::tensor::{Tensor, TensorData};
use burn_float8::{Float8Config, Float8State, Recipe, StatisticsConfig, without_float8};

use crate::programs::support::models::Mlp;
use crate::programs::support::{B, F8, applied, layer_of, mean_square, train, trained, values, with_parameters, x};

/// The student learns as if given only the teacher's outputs, also if the teacher casts x first:
/// recipe, history and samples are its own. A teacher takes no statistics, as no backward reaches it.
#[test]
fn a_student_learns_as_it_would_alone() {
    const STEPS: u64 = 6;
    let sampled = |recipe| Float8Config::new(recipe).with_statistics(StatisticsConfig::every(1));
    let run = |beside: bool, comes_first: bool| {
        let recipe = if comes_first { Recipe::Delayed } else { Recipe::Rowwise };
        let teacher = applied(&sampled(recipe), Mlp::<B>::new().no_grad());
        let outputs = [0, 1].map(|seed| values(teacher.forward(x(seed))));
        let student: Mlp<B> = with_parameters(Mlp::new(), 7);
        let student = sampled(Recipe::Delayed).apply(student).unwrap().0;
        let (student, losses) = train(student, 0..STEPS, |m, step| {
            let x = x::<B>(step % 2);
            if beside && comes_first {
                teacher.forward(x.clone());
            }
            let y = m.forward(x.clone());
            let data = TensorData::new(outputs[(step % 2) as usize].clone(), [6, 4]);
            let is_online = beside && !comes_first;
            let target = if is_online { teacher.forward(x) } else { Tensor::from_data(data, &Default::default()) };
            mean_square(y - target)
        });
        let is_sampled = |m: &Mlp<B>| layer_of(m, "first").fprop.operands[0].health.is_some();
        assert_eq!([&teacher, &student].map(is_sampled), [false, true], "{recipe}");
        (losses, Float8State::export(&student))
    };
    for comes_first in [false, true] {
        assert_eq!(run(true, comes_first), run(false, comes_first), "{comes_first}");
    }
}

/// Largest x of the steps before `step`, if step `i` has `x(i) · (i + 1)`.
fn largest_before(step: u64) -> f32 {
    (0..step).map(|i| (x::<B>(i) * (i + 1) as f32).abs().max().into_scalar()).fold(0.0, f32::max)
}

/// A layer that is frozen later continues its history, with and without a dgrad. Without one, its
/// scale is a step older.
#[test]
fn bottoms_that_are_frozen_later_keep_their_histories() {
    for is_tracked in [false, true] {
        let loss = |m: &Mlp<B>, step: u64| {
            let x = (x::<B>(step) * (1.0 + step as f32)).set_require_grad(is_tracked);
            mean_square(m.forward(x))
        };
        let (mut model, _) = train(applied(&Float8Config::new(Recipe::Delayed), Mlp::new()), 0..3, loss);
        assert!(Float8State::export(&model).layers["first"].input.is_some());
        model.first = model.first.no_grad();
        let (model, _) = train(model, 3..6, loss);
        let input = layer_of(&model, "first").fprop.operands[0].clone();
        assert_eq!(input.amax, Some((x::<B>(5) * 6.0).abs().max().into_scalar()));
        let scales = [4, 5].map(|step| Some(448.0 / largest_before(step)));
        let is_known = if is_tracked { scales.contains(&input.scale) } else { input.scale == scales[0] };
        assert!(is_known, "{is_tracked}: {:?}, not of {scales:?}", input.scale);
    }
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
