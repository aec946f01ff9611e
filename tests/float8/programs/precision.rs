//! Switching precision: for a part of a model, for a copy, for a closure; and the cost of
//! evaluation alone.
use burn::module::AutodiffModule;
use burn::tensor::backend::AutodiffBackend;
use burn_float8::{
    FallbackConfig, Float8Config, Float8State, Recipe, StatisticsConfig, float8_autocast, set_float8_enabled,
    without_float8,
};

use crate::programs::support::models::{Block, Mlp, input};
use crate::programs::support::{
    B, F8, Plain, applied, bits, calls, dw, float8_calls, layer_of, mean_square, own_report, panic_of, train,
    with_parameters, x,
};

/// y and the gradient of `first` without FP8.
fn without() -> [Vec<u32>; 2] {
    forward_backward::<Plain>(&with_parameters(Mlp::new(), 1))
}

fn forward_backward<A: AutodiffBackend>(model: &Mlp<A>) -> [Vec<u32>; 2] {
    let y = model.forward(x::<A>(1));
    let grads = mean_square(y.clone()).backward();
    [bits(y), bits(dw(&model.first, &grads))]
}

#[test]
fn a_submodule_is_switched_off() {
    let [model, other] = [(); 2].map(|()| applied::<B, Block<B>>(&Float8Config::tensorwise(), Block::new()));
    let run = |m: &Block<B>| drop(m.forward(input(1).require_grad()).mean().backward());
    let float8 = |m: &Block<B>| ["q", "k", "o"].map(|name| float8_calls(&layer_of(m, name)));
    set_float8_enabled(&model.q, false);
    run(&model);
    // Another model with the same configuration is not affected.
    run(&other);
    assert_eq!((float8(&model), float8(&other)), ([[0; 3], [1; 3], [1; 3]], [[1; 3]; 3]));
    let q = layer_of(&model, "q");
    assert_eq!((calls(&q)[1], q.fprop.reason.as_deref()), ([1; 3], Some("precision schedule")));
    // Clones and `valid` copies share the switch; the rest of the model does not.
    run(&model.clone());
    model.valid().forward(input(1));
    assert_eq!(float8(&model), [[0; 3], [3, 2, 2], [3, 2, 2]]);
    set_float8_enabled(&model.valid().q, true);
    run(&model);
    assert_eq!(float8(&model)[0], [1; 3]);
    set_float8_enabled(&model, false);
    run(&model);
    assert_eq!(float8(&model).map(|calls| calls[0]), [1, 4, 4]);
}

/// A copy in high precision, for evaluations or as a baseline, leaves the FP8 model unchanged.
#[test]
fn a_copy_is_switched_off() {
    let model: Mlp<B> = applied(&Float8Config::new(Recipe::Delayed).with_strict(true), Mlp::new());
    let trained = forward_backward(&model);
    assert!(trained[0] != without()[0] && trained[1] != without()[1]);
    let before = (own_report(&model).layers.iter().map(float8_calls).collect::<Vec<_>>(), Float8State::export(&model));
    let copy = without_float8(model.clone());
    for copy in [&copy, &copy.clone()] {
        assert_eq!(forward_backward(copy), without(), "the inner backend's own numbers");
    }
    for copy in [without_float8(model.valid()), copy.valid()] {
        assert_eq!(bits(copy.forward(x::<F8>(1))), without()[0]);
    }
    let after = (own_report(&model).layers.iter().map(float8_calls).collect(), Float8State::export(&model));
    assert_eq!(after, before);
    // The original continues in FP8, and so does another copy.
    assert_eq!(forward_backward(&model), trained);
    assert_eq!(bits(model.valid().forward(x::<F8>(1))), trained[0]);
}

#[test]
fn autocast_switches_off_in_a_closure() {
    let model: Mlp<B> = applied(&Float8Config::tensorwise().with_strict(true), Mlp::new());
    let float8 = forward_backward(&model);
    assert_ne!(float8, without());
    assert_eq!(float8_autocast(false, || forward_backward(&model)), without());
    assert_eq!(forward_backward(&model), float8, "on again");
    // The innermost closure applies.
    let nested = float8_autocast(false, || {
        let on = float8_autocast(true, || forward_backward(&model));
        (on, forward_backward(&model))
    });
    assert_eq!(nested, (float8.clone(), without()));
    // So does the own thread.
    let elsewhere = float8_autocast(false, || {
        let run = || forward_backward(&model);
        let other = std::thread::scope(|scope| scope.spawn(run).join().expect("no panic"));
        (other, run())
    });
    assert_eq!(elsewhere, (float8.clone(), without()));
    // `true` is the default. It does not put a filtered or switched-off layer into FP8.
    assert_eq!(float8_autocast(true, || forward_backward(&model)), float8);
    let filtered: Mlp<B> = applied(&Float8Config::tensorwise().with_filter_fqns(["first"]), Mlp::new());
    float8_autocast(true, || filtered.forward(x(1)));
    assert_eq!(float8_calls(&layer_of(&filtered, "first"))[0], 0);
    // A panic leaves the closure like a return.
    panic_of(|| float8_autocast(false, || panic!("inside")));
    assert_eq!(forward_backward(&model), float8);
}

/// High-precision calls leave no statistics or history, even after an evaluation has cast.
#[test]
fn disabled_linears_leave_no_statistics() {
    let loss = |m: &Mlp<B>, seed: u64| mean_square(m.forward(x(seed)));
    // A limit that no tensor meets.
    let limit = FallbackConfig { min_sqnr_db: Some(150.0), ..Default::default() };
    let config = Float8Config::tensorwise().with_statistics(StatisticsConfig::every(1)).with_fallback(limit);
    let has_fallen_back = |model: &Mlp<B>| Float8State::export(model).layers.values().any(|l| l.fallback.is_some());
    let model: Mlp<B> = applied(&config, Mlp::new());
    let model = float8_autocast(false, || train(model, 0..3, loss).0);
    set_float8_enabled(&model, false);
    let model = train(model, 0..3, loss).0;
    set_float8_enabled(&model, true);
    let (copy, _) = train(without_float8(model.clone()), 0..3, loss);
    assert!(!has_fallen_back(&model) && !has_fallen_back(&copy));
    assert!(has_fallen_back(&train(model, 0..3, loss).0), "the limit is one");

    for is_closure in [true, false] {
        let model: Mlp<B> = applied(&Float8Config::new(Recipe::Delayed), Mlp::new());
        let copy = if is_closure { model.clone() } else { without_float8(model.clone()) };
        let y = float8_autocast(!is_closure, || copy.forward(x::<B>(1)));
        model.valid().forward(x::<F8>(1));
        y.sum().backward();
        assert!(Float8State::export(&model).layers.is_empty(), "{:?}", Float8State::export(&model));
    }
}
