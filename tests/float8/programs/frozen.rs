//! Frozen teachers, targets and layers: no weight gradient, but still an amax history.
use burn::module::{AutodiffModule, Module};
use burn::nn::Linear;
use burn_float8::{Float8Config, Float8State, Recipe, StatisticsConfig, without_float8};

use crate::programs::support::models::Mlp;
use crate::programs::support::{
    B, F8, applied, bits, calls, layer_of, mean_square, to_target, train, with_parameters, x,
};

/// The student learns as it would without a teacher on the same x, also if the teacher casts x
/// first: recipe, history and samples are its own. A teacher takes no statistics, as no backward
/// reaches it.
#[test]
fn a_student_learns_as_it_would_alone() {
    let sampled = |recipe| Float8Config::new(recipe).with_statistics(StatisticsConfig::every(1));
    let is_sampled = |m: &Mlp<B>| layer_of(m, "first").fprop.operands[0].health.is_some();
    let run = |before: &[Mlp<B>], after: &[Mlp<B>]| {
        let student = sampled(Recipe::Delayed).apply(with_parameters(Mlp::new(), 7)).unwrap().0;
        let (student, losses) = train(student, 0..6, |m: &Mlp<B>, step| {
            let x = x::<B>(step % 2);
            let evaluate = |m: &Mlp<B>| assert_eq!(bits(m.forward(x.clone())), bits(m.forward(self::x(step % 2))));
            before.iter().for_each(evaluate);
            let y = m.forward(x.clone());
            after.iter().for_each(evaluate);
            to_target(y)
        });
        assert!(is_sampled(&student));
        (losses, Float8State::export(&student))
    };
    let alone = run(&[], &[]);
    for recipe in [Recipe::Delayed, Recipe::Rowwise] {
        let teacher = [applied(&sampled(recipe), Mlp::<B>::new().no_grad())];
        assert_eq!(run(&teacher, &[]), alone, "{recipe}");
        assert_eq!(run(&[], &teacher), alone, "{recipe}");
        assert!(!is_sampled(&teacher[0]), "{recipe}");
    }
}

/// A layer that is frozen later continues its history, with and without a dgrad. Its scale is a
/// step older: its own weight no longer begins a step.
#[test]
fn bottoms_that_are_frozen_later_keep_their_histories() {
    let input = |step: u64| x::<B>(step) * (1.0 + step as f32);
    let amax = |step: u64| input(step).abs().max().into_scalar();
    for is_tracked in [false, true] {
        let loss = |m: &Mlp<B>, step: u64| mean_square(m.forward(input(step).set_require_grad(is_tracked)));
        let (mut model, _) = train(applied(&Float8Config::new(Recipe::Delayed), Mlp::new()), 0..3, loss);
        model.first = model.first.no_grad();
        let (model, _) = train(model, 3..6, loss);
        let dgrads = if is_tracked { 6 } else { 0 };
        let first = layer_of(&model, "first");
        assert_eq!(calls(&first), [[6, dgrads, 3], [0; 3]], "{is_tracked}");
        let largest = (0..4).map(amax).fold(0.0, f32::max);
        let operand = &first.fprop.operands[0];
        assert_eq!((operand.amax, operand.scale), (Some(amax(5)), Some(448.0 / largest)), "{is_tracked}");
        // Newest first; the last step is not over.
        let state = &Float8State::export(&model).layers["first"];
        let [inputs, grad_outputs] = [&state.input, &state.grad_output].map(|cast| {
            let cast = cast.clone().expect("a history");
            let ended = cast.history.into_iter().filter(|amax| *amax > 0);
            cast.observed.into_iter().chain(ended).collect::<Vec<_>>()
        });
        assert_eq!(inputs, [5, 4, 3, 2, 1, 0].map(|step| amax(step).to_bits()), "{is_tracked}");
        assert_eq!(grad_outputs.len(), if is_tracked { 6 } else { 3 }, "{is_tracked}");
    }
}

/// `apply` and `without_float8` on a model without autodiff do not change which parameters train
/// later.
#[test]
fn below_autodiff_parameters_stay_trained_or_frozen() {
    let trained = |m: &Mlp<B>| {
        let of = |l: &Linear<B>| [l.weight.is_require_grad(), l.bias.as_ref().expect("it has one").is_require_grad()];
        [of(&m.first), of(&m.second)]
    };
    let new = Float8Config::tensorwise().apply(Mlp::<F8>::new()).unwrap().0;
    assert_eq!(trained(&new.train::<B>()), [[true; 2]; 2]);
    let mut model: Mlp<B> = applied(&Float8Config::tensorwise(), Mlp::new());
    model.first = model.first.no_grad();
    let applied_again = Float8Config::new(Recipe::Rowwise).apply(model.valid()).unwrap().0;
    for valid in [applied_again, without_float8(model.valid())] {
        assert_eq!(trained(&valid.train::<B>()), [[false; 2], [true; 2]]);
    }
}
