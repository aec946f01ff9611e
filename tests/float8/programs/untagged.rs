//! Behaviour of untagged linears. It is fixed once per device and process, so each test runs in a
//! separate process.
use burn::module::{AutodiffModule, Module};
use burn::nn::{Linear, LinearConfig};
use burn::optim::{GradientsParams, Optimizer, SgdConfig};
use burn::record::{FullPrecisionSettings, NamedMpkBytesRecorder, Recorder};
use burn::tensor::Tensor;
use burn::tensor::backend::Backend;
use burn_float8::{Float8Config, Float8Error, Recipe, config::Untagged, grouped_linear, report, set_default_config};

use crate::programs::quantized::quantizer;
use crate::programs::support::models::{D, Mlp};
use crate::programs::support::{B, F8, Plain, bits, dw, panic_of, relative_error, tensor, values, with_parameters};
use crate::support::process;

const K: usize = 32;
const N: usize = 16;

/// Runs a test in its own process.
fn alone(name: &str, test: impl FnOnce()) {
    process::alone(module_path!(), name, &[], test);
}

fn linear<A: Backend>() -> Linear<A> {
    with_parameters(LinearConfig::new(K, N).init(&Default::default()), 5)
}

fn grouped<A: Backend>() -> Vec<f32> {
    let (x, w) = (tensor::<A, 2>([7, K], 1), tensor::<A, 3>([2, K, N], 2));
    values(grouped_linear(x, w, Tensor::from_ints([3, 7], &Default::default())))
}

fn run<A: Backend>(linear: &Linear<A>) -> Vec<f32> {
    values(linear.forward(tensor::<A, 2>([7, K], 1)))
}

fn gradients(linear: &Linear<B>) -> [Vec<u32>; 2] {
    let x = tensor::<B, 2>([7, K], 1).require_grad();
    let grads = linear.forward(x.clone()).powf_scalar(2.0).sum().backward();
    [x.grad(&grads).expect("tracked"), dw(linear, &grads)].map(bits)
}

fn applied(config: Float8Config) -> Mlp<F8> {
    config.apply(Mlp::new()).unwrap().0
}

fn with(untagged: Untagged) -> Float8Config {
    Float8Config::tensorwise().with_untagged(untagged)
}

/// Error of a model with two layers that are lost.
fn lost() -> Float8Error {
    Float8Error::UntaggedLinears { linears: 2, names: "first, second".into() }
}

fn near(float8: &[f32], plain: &[f32]) -> bool {
    let error = relative_error(float8, plain);
    error > 0.0 && error < 0.2
}

/// Wrapping the backend is enough: configurations applied later to other models, on any thread,
/// change nothing.
#[test]
fn the_first_linear_settles_it() {
    alone("the_first_linear_settles_it", || {
        let plain = run::<Plain>(&linear());
        let untagged = linear::<F8>();
        // A failed apply does not fix the behaviour.
        Float8Config::tensorwise().with_filter_fqns(["nothing"]).apply(Mlp::<F8>::new()).unwrap_err();
        let float8 = run(&untagged);
        assert!(near(&float8, &plain));
        assert!(near(&grouped::<F8>(), &grouped::<Plain>()), "so it is for linears that are called by name");
        let trained = gradients(&linear());
        let strict = Float8Config::tensorwise().with_strict(true);
        for config in [strict, with(Untagged::Error), with(Untagged::HighPrecision)] {
            let model = std::thread::spawn(move || applied(config)).join().unwrap();
            let calls = report(&untagged).layers.iter().map(|l| l.fprop.emulated).sum::<u64>();
            assert_eq!(calls, 0, "apply resets the counters of untagged linears");
            assert_eq!(run(&untagged), float8);
            assert_eq!(gradients(&linear()), trained);
            drop(model);
            assert_eq!(run(&untagged), float8);
        }
        report(&untagged).verify().unwrap();
        // Layers that a model has lost are named too.
        let rebuilt = Mlp::<F8>::new();
        rebuilt.forward(tensor::<F8, 2>([3, D], 1));
        assert_eq!(report(&rebuilt).verify().unwrap_err(), lost());
    });
}

/// After an `apply` untagged linears run in high precision, even after that model is dropped.
#[test]
fn the_first_apply_settles_it() {
    alone("the_first_apply_settles_it", || {
        let plain = run::<Plain>(&linear());
        let untagged = linear::<F8>();
        let model = applied(Float8Config::tensorwise().with_strict(true));
        assert_eq!(run(&untagged), plain);
        let other = applied(with(Untagged::Default));
        assert_eq!(run(&untagged), plain);
        drop((model, other));
        assert_eq!(run(&untagged), plain);

        // A default for the device applies, on and off.
        let set = |config: Option<&Float8Config>| set_default_config::<F8>(&Default::default(), config).unwrap();
        set(Some(&Float8Config::new(Recipe::Rowwise)));
        let rowwise = run(&untagged);
        assert!(near(&rowwise, &plain));
        drop(applied(Float8Config::tensorwise()));
        assert_eq!(run(&untagged), rowwise);
        set(Some(&Float8Config::tensorwise()));
        assert!(near(&run(&untagged), &plain) && run(&untagged) != rowwise);
        set(None);
        assert_eq!(run(&untagged), plain);
    });
}

#[test]
fn a_configuration_may_refuse_them() {
    alone("a_configuration_may_refuse_them", || {
        let strict = applied(with(Untagged::Error).with_strict(true));
        let message = panic_of(|| drop(run(&linear::<F8>())));
        assert!(message.starts_with(&format!("a linear with weight [{K}, {N}] carries no layer")), "{message}");
        panic_of(|| drop(gradients(&linear())));
        // Tagged linears are not affected.
        assert!(values(strict.forward(tensor::<F8, 2>([3, D], 1))).iter().all(|v| v.is_finite()));
        report(&strict).verify().unwrap();
        drop(strict);
        panic_of(|| drop(run(&linear::<F8>())));
    });
}

#[test]
fn a_configuration_may_leave_them_to_the_default() {
    alone("a_configuration_may_leave_them_to_the_default", || {
        let _model = applied(with(Untagged::Default));
        // FP8 copies of their weights live no longer than copies of tagged weights.
        let model: Mlp<B> = with_parameters(Mlp::new(), 1);
        let live = |model: &Mlp<B>| report(model).layers.iter().map(|l| l.live_copies).sum::<u64>();
        let loss = model.forward(tensor::<B, 2>([6, D], 1)).powf_scalar(2.0).mean();
        assert!(live(&model) > 0);
        let grads = GradientsParams::from_grads(loss.backward(), &model);
        let model = SgdConfig::new().init::<B, Mlp<B>>().step(0.1, model, grads);
        assert_eq!(live(&model), 0);
        assert!(near(&run(&linear::<F8>()), &run::<Plain>(&linear())));
        report(&linear::<F8>()).verify().unwrap();
    });
}

/// A model's report names its linears that lost their layers; other reports do not.
#[test]
fn lost_layers_are_named() {
    alone("lost_layers_are_named", || {
        let model = Float8Config::tensorwise().apply(Mlp::<B>::new()).unwrap().0;
        let valid = model.valid();
        valid.forward(tensor::<F8, 2>([3, D], 1));
        report(&valid).verify().unwrap();

        // A model without the configuration, with the record loaded into it.
        let recorder = NamedMpkBytesRecorder::<FullPrecisionSettings>::default();
        let bytes = recorder.record(valid.clone().into_record(), ()).unwrap();
        let loaded: Mlp<F8> = Mlp::new().load_record(recorder.load(bytes, &Default::default()).unwrap());
        let quantized = valid.clone().quantize_weights(&mut quantizer::<F8>());
        for model in [loaded, quantized] {
            model.forward(tensor::<F8, 2>([3, D], 1));
            let found = report(&model);
            assert_eq!(found.untagged, ["first", "second"]);
            assert_eq!(found.verify().unwrap_err(), lost());
            assert!(found.to_string().contains("first carries no layer"), "{found}");
            report(&valid).verify().unwrap();
        }

        // One untagged linear in a model is named, whether or not untagged linears run by default.
        let mut mixed = valid.clone();
        mixed.second = Mlp::<F8>::new().second;
        assert_eq!(report(&mixed).untagged, ["second"]);
        // An intentional setting is not an error.
        set_default_config::<F8>(&Default::default(), None).unwrap();
        mixed.forward(tensor::<F8, 2>([3, D], 1));
        report(&mixed).verify().unwrap();
    });
}
