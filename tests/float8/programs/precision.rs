//! Switching precision: for a part of a model, for a copy, for a closure; and the cost of
//! evaluation alone.
use std::sync::Barrier;

use burn::module::AutodiffModule;
use burn::tensor::Tensor;
use burn::tensor::backend::Backend;
use burn_float8::{
    FallbackConfig, Float8Config, Float8State, Recipe, StatisticsConfig, float8_autocast, set_float8_enabled,
    without_float8,
};

use crate::programs::support::models::{Attention, D, Mlp};
use crate::programs::support::{
    B, F8, Plain, applied, bits, counters, float8_calls, high_precision_calls, layer, layer_of, own_report, panic_of,
    tensor, train, with_parameters,
};

fn x<A: Backend>(seed: u64) -> Tensor<A, 2> {
    tensor([6, D], seed)
}

/// y and the gradient of `first` without FP8.
fn without() -> [Vec<u32>; 2] {
    let model: Mlp<Plain> = with_parameters(Mlp::new(), 1);
    forward_backward(&model)
}

fn forward_backward<A: burn::tensor::backend::AutodiffBackend>(model: &Mlp<A>) -> [Vec<u32>; 2] {
    let y = model.forward(x::<A>(1));
    let grads = y.clone().powf_scalar(2.0).mean().backward();
    [bits(y), bits(model.first.weight.grad(&grads).expect("tracked"))]
}

#[test]
fn a_submodule_is_switched_off() {
    let [model, other] = [(); 2].map(|()| applied::<B, Attention<B>>(&Float8Config::tensorwise(), Attention::new()));
    let run = |m: &Attention<B>| drop(m.forward(tensor([2, 4, D], 1)).mean().backward());
    set_float8_enabled(&model.q, false);
    run(&model);
    // Another model with the same configuration is not affected.
    run(&other);
    assert_eq!(float8_calls(&layer_of(&other, "q")), [1; 3]);
    let report = own_report(&model);
    assert_eq!(high_precision_calls(layer(&report, "q")), [1; 3]);
    assert_eq!(layer(&report, "q").fprop.reason.as_deref(), Some("precision schedule"));
    for name in ["k", "v", "o"] {
        assert_eq!(float8_calls(layer(&report, name)), [1; 3], "{name}");
        assert_eq!(high_precision_calls(layer(&report, name)), [0; 3], "{name}");
    }
    // Clones and `valid` copies share the switch; the rest of the model does not.
    run(&model.clone());
    model.valid().forward(tensor([2, 4, D], 1));
    assert_eq!(float8_calls(&layer_of(&model, "q")), [0; 3]);
    assert_eq!(float8_calls(&layer_of(&model, "k")), [3, 2, 2]);
    set_float8_enabled(&model.valid().q, true);
    run(&model);
    assert_eq!(float8_calls(&layer_of(&model, "q")), [1; 3]);
    set_float8_enabled(&model, false);
    run(&model);
    assert_eq!(["q", "k", "v", "o"].map(|name| float8_calls(&layer_of(&model, name))[0]), [1, 4, 4, 4]);
}

/// High-precision evaluation during FP8 training.
#[test]
fn a_copy_for_evaluation_is_switched_off() {
    let model: Mlp<B> = applied(&Float8Config::new(Recipe::Delayed).with_strict(true), Mlp::new());
    let trained = forward_backward(&model);
    let before = counters(&model);
    let state = Float8State::export(&model);
    let evaluation = without_float8(model.valid());
    assert_eq!(bits(evaluation.forward(x::<F8>(1))), without()[0], "the inner backend's own numbers");
    let float8 = |counters: &[(String, [[u64; 3]; 3], u64)]| counters.iter().map(|c| c.1[0]).collect::<Vec<_>>();
    assert_eq!(float8(&counters(&model)), float8(&before));
    assert_eq!(Float8State::export(&model), state);
    // The original continues in FP8, and so does another copy.
    assert_eq!(forward_backward(&model), trained);
    let y = bits(model.valid().forward(x::<F8>(1)));
    assert_eq!(y, trained[0]);
    assert_ne!(y, without()[0]);
}

#[test]
fn a_copy_that_is_off_has_such_a_backward() {
    let model: Mlp<B> = applied(&Float8Config::tensorwise(), Mlp::new());
    let copy = without_float8(model.clone());
    assert_eq!(forward_backward(&copy), without());
    let float8 = forward_backward(&model);
    assert_ne!(float8, without());
    assert!(float8_calls(&layer_of(&model, "second")).iter().all(|calls| *calls == 1));
    // Its copies stay in high precision, too.
    assert_eq!(bits(copy.valid().forward(x::<F8>(1))), without()[0]);
    assert_eq!(forward_backward(&copy.clone()), without());
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
    let loss = |m: &Mlp<B>, seed: u64| m.forward(x(seed)).powf_scalar(2.0).mean();
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

/// Off on this thread and FP8 on the other, at the same time on the same model.
#[test]
fn autocast_switches_off_in_one_thread_of_two() {
    let model: Mlp<B> = applied(&Float8Config::tensorwise(), Mlp::new());
    let float8 = forward_backward(&model);
    let barrier = Barrier::new(2);
    let copies = [model.clone(), model.clone()];
    let [off, on] = std::thread::scope(|scope| {
        let [first, second] = &copies;
        let off = scope.spawn(|| {
            float8_autocast(false, || {
                barrier.wait();
                let ran: Vec<_> = (0..5).map(|_| forward_backward(first)).collect();
                barrier.wait();
                ran
            })
        });
        let on = scope.spawn(|| {
            barrier.wait();
            let ran: Vec<_> = (0..5).map(|_| forward_backward(second)).collect();
            barrier.wait();
            ran
        });
        [off, on].map(|thread| thread.join().expect("no panic"))
    });
    assert_eq!(off, vec![without(); 5]);
    assert_eq!(on, vec![float8; 5]);
}
