//! burn-store: a converted model saves and loads snapshots in either format, and its layers keep
//! their precision.
use burn::tensor::backend::Backend;
use burn_float8::{Float8Config, Recipe};
use burn_store::{BurnpackStore, HalfPrecisionAdapter, ModuleSnapshot, ModuleStore, SafetensorsStore};

use crate::programs::support::models::Attention;
use crate::programs::support::{
    B, Plain, applied, bits, calls, float8_calls, layer, mean_square, own_report, train, with_parameters, x3,
};

fn config(recipe: Recipe) -> Float8Config {
    Float8Config::new(recipe).with_filter_fqns(["k"]).with_strict(true)
}

fn trained(recipe: Recipe) -> Attention<B> {
    let model: Attention<B> = applied(&config(recipe), Attention::new());
    train(model, 0..3, |m, step| mean_square(m.forward(x3(step)))).0
}

fn weights<A: Backend>(m: &Attention<A>) -> Vec<Vec<u32>> {
    m.linears().map(|l| bits(l.weight.val())).to_vec()
}

/// Loads into a converted model with other parameters.
fn loads<S: ModuleStore>(name: &str, recipe: Recipe, saved: &Attention<B>, store: &mut S)
where
    S::Error: core::fmt::Debug,
{
    let (mut model, _) = config(recipe).apply(with_parameters(Attention::<B>::new(), 2)).unwrap();
    let before = model.forward(x3(9));
    assert_ne!(bits(before), bits(saved.forward(x3(9))));
    let result = model.load_from(store).unwrap();
    assert!(result.is_success() && result.applied.len() == 5, "{name}: {result}");
    assert_eq!(weights(&model), weights(saved), "{name}");
    let y = model.forward(x3(9));
    mean_square(y.clone()).backward();
    if recipe != Recipe::Delayed {
        assert_eq!(bits(y), bits(saved.forward(x3(9))), "{name}");
    }
    for l in &own_report(&model).layers {
        // Forward twice, backward once.
        let ran = [2, u64::from(l.name != "embed"), 1];
        let expected = if l.name == "k" { [[0; 3], ran] } else { [ran, [0; 3]] };
        assert_eq!(calls(l), expected, "{name}: {}", l.name);
    }
    own_report(&model).verify().unwrap();
}

#[test]
fn snapshots_of_either_format() {
    let folder = tempfile::tempdir().unwrap();
    for recipe in [Recipe::Tensorwise, Recipe::Delayed] {
        let saved = trained(recipe);
        let path = folder.path().join(format!("{recipe}.safetensors"));
        saved.save_into(&mut SafetensorsStore::from_file(&path)).unwrap();
        loads("safetensors", recipe, &saved, &mut SafetensorsStore::from_file(&path));
        let path = folder.path().join(format!("{recipe}.bpk"));
        saved.save_into(&mut BurnpackStore::from_file(&path)).unwrap();
        loads("burnpack", recipe, &saved, &mut BurnpackStore::from_file(&path));
    }
}

/// A snapshot contains the model, not its FP8 copies: a backend without FP8 can read it.
#[test]
fn snapshots_know_nothing_of_float8() {
    let saved = trained(Recipe::Tensorwise);
    let mut store = SafetensorsStore::from_bytes(None);
    saved.save_into(&mut store).unwrap();
    let bytes = store.get_bytes().unwrap();
    let mut plain: Attention<Plain> = Attention::new();
    plain.load_from(&mut SafetensorsStore::from_bytes(Some(bytes.clone()))).unwrap();
    assert_eq!(weights(&plain), weights(&saved));
    // The reverse: load into a model that is converted afterwards.
    let mut new = Attention::<B>::new();
    new.load_from(&mut SafetensorsStore::from_bytes(Some(bytes))).unwrap();
    let model = config(Recipe::Tensorwise).apply(new).unwrap().0;
    assert_eq!(bits(model.forward(x3(9))), bits(saved.forward(x3(9))));
}

/// Weights loaded in half precision from a file run in FP8 from that dtype.
#[test]
fn half_precision_files() {
    let saved = trained(Recipe::Tensorwise);
    let mut store = SafetensorsStore::from_bytes(None).with_to_adapter(HalfPrecisionAdapter::new());
    saved.save_into(&mut store).unwrap();
    let (mut model, _) = config(Recipe::Tensorwise).apply(with_parameters(Attention::<B>::new(), 2)).unwrap();
    model.load_from(&mut SafetensorsStore::from_bytes(Some(store.get_bytes().unwrap()))).unwrap();
    assert_eq!(model.q.weight.val().dtype(), burn::tensor::DType::F16);
    model.forward(x3(1)).sum().backward();
    let report = own_report(&model);
    assert_eq!(float8_calls(layer(&report, "q")), [1; 3]);
    assert_eq!(float8_calls(layer(&report, "k")), [0; 3]);
    report.verify().unwrap();
}
