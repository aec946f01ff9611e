//! Records: loading into copies without autodiff, round trips through every recorder, and models
//! without gradients.
use burn::module::{AutodiffModule, Module};
use burn::record::{
    BinFileRecorder, BinGzFileRecorder, DoublePrecisionSettings, FileRecorder, FullPrecisionSettings,
    HalfPrecisionSettings, JsonGzFileRecorder, NamedMpkFileRecorder, NamedMpkGzFileRecorder, PrettyJsonFileRecorder,
};
use burn_float8::{Float8Config, Float8Error, Float8State, Float8StateModule, Recipe};

use crate::programs::support::learner::{Trainable, trainable};
use crate::programs::support::models::Mlp;
use crate::programs::support::{
    B, F8, Plain, applied, bits, float8_calls, layer, layer_of, mean_square, own_report, train, with_parameters, x,
};

/// Parameters of a `valid` copy have no mappers, so values loaded into them are untagged.
#[test]
fn loaded_into_a_copy_without_autodiff() {
    let config = Float8Config::tensorwise().with_filter_fqns(["first"]);
    let model: Mlp<B> = applied(&config, Mlp::new());
    let other: Mlp<F8> = with_parameters(Mlp::new(), 2);
    let copy = model.valid().load_record(other.clone().into_record());
    copy.forward(x::<F8>(1));
    assert_eq!(float8_calls(&layer_of(&model, "first")), [0; 3], "filtered");
    // Nor in FP8 as an untagged linear: the numbers are the inner backend's.
    let plain: Mlp<Plain> = with_parameters(Mlp::new(), 2);
    assert_eq!(bits(copy.first.forward(x::<F8>(1))), bits(plain.first.forward(x::<Plain>(1))));
    // Applied again, it runs as configured.
    let copy = config.apply(copy).unwrap().0;
    copy.forward(x::<F8>(1));
    let report = own_report(&copy);
    assert_eq!(float8_calls(layer(&report, "first")), [0; 3]);
    assert_eq!(float8_calls(layer(&report, "second")), [1, 0, 0]);
}

fn new(seed: u64) -> Trainable<B> {
    trainable(&Float8Config::new(Recipe::Delayed), seed)
}

fn trained() -> Trainable<B> {
    train(new(1), 0..4, |m, step| mean_square(m.net.forward(x(step)) * (1.0 + step as f32))).0
}

/// Saves a trained model to a file and loads it into another.
fn through_file<R: FileRecorder<B>, M: Module<B>>(recorder: R, [trained, new]: [M; 2], net: fn(&M) -> &Mlp<B>) {
    let folder = tempfile::tempdir().unwrap();
    let state = Float8State::export(net(&trained));
    assert!(state.layers["first"].input.is_some());
    let path = folder.path().join("model");
    trained.save_file(&path, &recorder).unwrap();
    let loaded = new.load_file(&path, &recorder, &Default::default()).unwrap();
    assert_eq!(Float8State::export(net(&loaded)), state, "{}", R::file_extension());
}

/// The state is stored as bits, not floats, so no recorder's precision rounds it. In formats
/// without names a missing field shifts all others.
#[test]
fn the_state_goes_through_every_recorder() {
    let models = || [trained(), new(2)];
    through_file(NamedMpkFileRecorder::<HalfPrecisionSettings>::new(), models(), |m| &m.net);
    through_file(NamedMpkGzFileRecorder::<DoublePrecisionSettings>::new(), models(), |m| &m.net);
    through_file(PrettyJsonFileRecorder::<FullPrecisionSettings>::new(), models(), |m| &m.net);
    through_file(JsonGzFileRecorder::<FullPrecisionSettings>::new(), models(), |m| &m.net);
    through_file(BinFileRecorder::<FullPrecisionSettings>::new(), models(), |m| &m.net);
    through_file(BinGzFileRecorder::<HalfPrecisionSettings>::new(), models(), |m| &m.net);
    // The state may come after the parameters, whose step an evaluation has begun.
    let models = models().map(|m| (m.net, m.float8));
    models[0].0.valid().forward(x::<F8>(9));
    through_file(NamedMpkFileRecorder::<FullPrecisionSettings>::new(), models, |m| &m.0);
}

/// The state's module supports the usual operations on modules.
#[test]
fn the_state_is_a_module_like_others() {
    let model = trained();
    let state = Float8State::export(&model.net);
    let model = model.clone().fork(&Default::default()).to_device(&Default::default()).no_grad();
    assert_eq!(Float8State::export(&model.net), state);
    let inner = model.valid();
    inner.net.forward(x::<F8>(1));
    assert!(!format!("{model} {model:?}").is_empty());
    assert_eq!(Module::<B>::num_params(&model), Module::<B>::num_params(&model.net), "it has no parameters");
    let back = Trainable::<B>::from_inner(inner);
    assert_eq!(Float8State::export(&back.net).step, Float8State::export(&model.net).step);
    // There is no state before a configuration is applied.
    assert_eq!(Float8StateModule::new(&Mlp::<B>::new()).unwrap_err(), Float8Error::NotApplied);
}
