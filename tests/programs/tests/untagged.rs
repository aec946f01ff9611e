//! What linears do whose weight carries no tag, before and after a configuration is applied: one process, one test, since all
//! of it is the process's.
#[allow(dead_code, unused_imports, unused_macros, reason = "other test programs use the rest")]
#[path = "programs/support/mod.rs"]
mod support;

use burn::nn::{Linear, LinearConfig};
use burn::tensor::Tensor;
use burn::tensor::backend::Backend;
use burn_float8::{Float8Config, Recipe, config::Untagged, grouped_linear, set_default_config};

use support::models::Mlp;
use support::{B, F8, Plain, bits, panic_of, relative_error, tensor, values, with_parameters};

const K: usize = 32;
const N: usize = 16;

fn linear<A: Backend>() -> Linear<A> {
    with_parameters(LinearConfig::new(K, N).init(&Default::default()), 5)
}

fn grouped<A: Backend>() -> Vec<u32> {
    let (x, w) = (tensor::<A, 2>([7, K], 1), tensor::<A, 3>([2, K, N], 2));
    bits(grouped_linear(x, w, Tensor::from_ints([3, 7], &Default::default())))
}

fn run<A: Backend>(linear: &Linear<A>) -> Vec<u32> {
    bits(linear.forward(tensor::<A, 2>([7, K], 1)))
}

fn applied(config: Float8Config) -> Mlp<F8> {
    config.convert(Mlp::new()).unwrap().0
}

fn with(untagged: Untagged) -> Float8Config {
    Float8Config::tensorwise().with_untagged(untagged)
}

#[test]
fn untagged_linears() {
    let plain = run::<Plain>(&linear());
    let untagged = linear::<F8>();
    let gradients = |l: &Linear<B>| {
        let x = tensor::<B, 2>([7, K], 1).require_grad();
        let grads = l.forward(x.clone()).powf_scalar(2.0).sum().backward();
        [bits(x.grad(&grads).unwrap()), bits(l.weight.grad(&grads).unwrap())]
    };

    // Before any apply: wrapping the backend is enough.
    let float8 = run(&untagged);
    let floats = |bits: &[u32]| bits.iter().map(|bits| f32::from_bits(*bits)).collect::<Vec<_>>();
    let error = relative_error(&floats(&float8), &floats(&plain));
    assert!(float8 != plain && error < 0.2, "{error}");
    let float8_gradients = gradients(&linear());
    // So it is for linears that are called by name.
    let experts = grouped::<F8>();
    let error = relative_error(&floats(&experts), &floats(&grouped::<Plain>()));
    assert!(error > 0.0 && error < 0.2, "{error}");
    // A failed apply changes nothing.
    Float8Config::tensorwise().with_filter_fqns(["nothing"]).convert(Mlp::<F8>::new()).unwrap_err();
    assert_eq!(run(&untagged), float8);

    // After one: high precision, whatever is strict, and also when that model is gone.
    let model = applied(Float8Config::tensorwise().with_strict(true));
    assert_eq!(run(&untagged), plain);
    assert_ne!(gradients(&linear()), float8_gradients);
    drop(model);
    assert_eq!(run(&untagged), plain);

    // A live configuration says otherwise; of several, an error comes before high precision, that before the default.
    let default = applied(with(Untagged::Default));
    assert_eq!(run(&untagged), float8);
    assert_eq!(gradients(&linear()), float8_gradients);
    let high_precision = applied(with(Untagged::HighPrecision));
    assert_eq!(run(&untagged), plain);
    let error = applied(with(Untagged::Error));
    let message = panic_of(|| drop(run(&untagged)));
    assert!(message.starts_with(&format!("a linear with weight [{K}, {N}] carries no layer")), "{message}");
    panic_of(|| drop(gradients(&linear())));
    // A clone keeps it alive; copies of its casts, of which the thread has the last, do not.
    let clone = error.clone();
    clone.forward(tensor::<F8, 2>([7, support::models::D], 1));
    drop(error);
    panic_of(|| drop(run(&untagged)));
    drop(clone);
    assert_eq!(run(&untagged), plain);
    drop(high_precision);
    assert_eq!(run(&untagged), float8);
    drop(default);
    assert_eq!(run(&untagged), plain);

    // Tagged linears are not concerned.
    let strict = applied(with(Untagged::Error).with_strict(true));
    let y = strict.forward(tensor::<F8, 2>([3, support::models::D], 1));
    assert!(values(y).iter().all(|v| v.is_finite()));
    let error = burn_float8::report(&strict).verify();
    assert!(error.is_ok(), "{error:?}");
    drop(strict);
    // The thread keeps its last activations, which keep their layers, until its next linears.
    let other = applied(Float8Config::tensorwise());
    (0..2).for_each(|seed| drop(other.forward(tensor::<F8, 2>([3, support::models::D], seed))));
    drop(other);

    // A default that was set for the device counts, on and off.
    set_default_config::<F8>(&Default::default(), Some(&Float8Config::new(Recipe::Rowwise))).unwrap();
    let rowwise = run(&untagged);
    assert!(rowwise != plain && rowwise != float8);
    let model = applied(Float8Config::tensorwise());
    assert_eq!(run(&untagged), rowwise);
    drop(model);
    set_default_config::<F8>(&Default::default(), None).unwrap();
    assert_eq!(run(&untagged), plain);
    set_default_config::<F8>(&Default::default(), Some(&Float8Config::tensorwise())).unwrap();
    assert_eq!(run(&untagged), float8);

    // In a file.
    for (name, untagged) in
        [("high_precision", Untagged::HighPrecision), ("default", Untagged::Default), ("error", Untagged::Error)]
    {
        let config: Float8Config = serde_json::from_str(&format!(r#"{{"untagged": "{name}"}}"#)).unwrap();
        assert_eq!(config, with(untagged));
        let json = serde_json::to_string(&with(untagged)).unwrap();
        assert_eq!(serde_json::from_str::<Float8Config>(&json).unwrap(), with(untagged), "{json}");
    }
}
