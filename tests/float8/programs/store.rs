//! burn-store: a converted model saves and loads snapshots in either format, and its layers keep
//! their precision.
use burn::tensor::backend::Backend;
use burn_float8::{Float8Config, Recipe};
use burn_store::{BurnpackStore, HalfPrecisionAdapter, ModuleSnapshot, ModuleStore, SafetensorsStore};

use crate::programs::support::models::{Block, input};
use crate::programs::support::{
    B, Plain, applied, bits, calls, float8_calls, layer_of, mean_square, own_report, train, with_parameters,
};

fn config(recipe: Recipe) -> Float8Config {
    Float8Config::new(recipe).with_filter_fqns(["k"]).with_strict(true)
}

fn trained(recipe: Recipe) -> Block<B> {
    let model: Block<B> = applied(&config(recipe), Block::new());
    train(model, 0..3, |m, step| mean_square(m.forward(input(step)))).0
}

fn weights<A: Backend>(m: &Block<A>) -> Vec<Vec<u32>> {
    m.linears().map(|l| bits(l.weight.val())).to_vec()
}

/// Loads into a converted model with other parameters.
fn loads<S: ModuleStore>(name: &str, recipe: Recipe, saved: &Block<B>, store: &mut S)
where
    S::Error: core::fmt::Debug,
{
    let (mut model, _) = config(recipe).apply(with_parameters(Block::<B>::new(), 2)).unwrap();
    let before = model.forward(input(9));
    assert_ne!(bits(before), bits(saved.forward(input(9))));
    let result = model.load_from(store).unwrap();
    assert!(result.is_success() && result.applied.len() == 7, "{name}: {result}");
    assert_eq!(weights(&model), weights(saved), "{name}");
    let y = model.forward(input(9));
    mean_square(y.clone()).backward();
    if recipe != Recipe::Delayed {
        assert_eq!(bits(y), bits(saved.forward(input(9))), "{name}");
    }
    for l in &own_report(&model).layers {
        // Forward twice, backward once. x needs no gradient.
        let ran = [2, u64::from(!["q", "k", "v"].contains(&l.name.as_str())), 1];
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
    let mut plain: Block<Plain> = Block::new();
    plain.load_from(&mut SafetensorsStore::from_bytes(Some(store.get_bytes().unwrap()))).unwrap();
    assert_eq!(weights(&plain), weights(&saved));
}

/// Weights loaded in half precision from a file run in FP8 from that dtype.
#[test]
fn half_precision_files() {
    let mut store = SafetensorsStore::from_bytes(None).with_to_adapter(HalfPrecisionAdapter::new());
    trained(Recipe::Tensorwise).save_into(&mut store).unwrap();
    let mut model: Block<B> = applied(&config(Recipe::Tensorwise), Block::new());
    model.load_from(&mut SafetensorsStore::from_bytes(Some(store.get_bytes().unwrap()))).unwrap();
    assert_eq!(model.q.weight.val().dtype(), burn::tensor::DType::F16);
    model.forward(input(1).require_grad()).sum().backward();
    assert_eq!(["q", "k"].map(|name| float8_calls(&layer_of(&model, name))), [[1; 3], [0; 3]]);
}
