//! FP8-only models from checkpoints: memory, results, and the checkpoint's input scales.

use crate::common::*;
use crate::float8_exports::{DYNAMIC, export, square};

/// Model of a folder with these settings, FP8 only or with values, and what is printed.
fn prepared(folder: &Path, recipe: Recipe, fp8_only: bool, settings: &[&str]) -> (Decoder<Train>, String) {
    let folder = format!("model.hf_path={}", folder.display());
    let recipe = format!("float8.recipe={recipe}");
    let settings = [settings, &[&folder, &recipe, "training.precision=fp8"]].concat();
    let settings: Vec<_> = settings.into_iter().map(String::from).collect();
    let config = RunConfig { fp8_only, ..RunConfig::load(None, &settings).unwrap() };
    let weights = Weights::open(&config, None, config.dimensions().unwrap()).unwrap();
    let (progress, mut out) = (ProgressLine::hidden(), vec![]);
    let model = prepare::<Decoders, Train>(&config, weights, &Default::default(), &progress, &mut out).unwrap();
    (model, String::from_utf8(out).unwrap())
}

#[test]
fn codes_of_a_file_are_kept() {
    let dir = tempfile::tempdir().unwrap();
    for recipe in DYNAMIC {
        let folder = dir.path().join(recipe.to_string());
        export(&model(square(false), 12), recipe, &folder).unwrap();
        let (model, _) = prepared(&folder, recipe, true, &[]);
        let files = TensorFiles::open_folder(&folder).unwrap();
        let kept: Vec<_> = burn_float8::weights::read_codes::<Train, _>(&model).collect();
        assert_eq!(kept.len(), 14, "{recipe}");
        for (name, weight) in kept {
            let stored = files.get(&format!("model.{name}.weight")).unwrap();
            assert!(stored.dtype() == Dtype::F8_E4M3 && stored.bytes().unwrap() == weight.codes, "{recipe} {name}");
        }
    }
}

#[test]
fn commands_run_a_folder_in_fp8_as_it_is() {
    let (data, dir) = (text(), tempfile::tempdir().unwrap());
    let data = data.path().to_str().unwrap();
    let folder = dir.path().join("fp8");
    export(&model(square(false), 12), Recipe::Rowwise, &folder).unwrap();
    let folder = folder.to_str().unwrap();
    let eval = |flags: &[&str]| {
        let fixed = ["eval", folder, "--data", data, "--set", "data.tokenizer=bytes", "--set", "training.seq_len=24"];
        let printed = float8(&[&fixed, flags].concat()).unwrap();
        (printed_loss(&printed), printed)
    };
    let (own, printed) = eval(&[]);
    assert!(printed.contains("FP8-only weights: 14 of 15 linears"), "{printed}");
    let (with_values, printed) = eval(&["--precision", "fp8"]);
    assert!(!printed.contains("FP8-only"), "{printed}");
    assert_eq!(own, with_values);
    let (f32, _) = eval(&["--precision", "f32"]);
    assert_ne!(own, f32);
    let flags = ["--prompt", "fn", "--max-new-tokens", "4", "--temperature", "0", "--set", "data.tokenizer=bytes"];
    assert!(float8(&[&["generate", folder], &flags[..]].concat()).unwrap().starts_with("fn"));
}

/// Requantized codes are reported, with the recipe that keeps them; so are scales that are
/// no squares where squares are requested.
#[test]
fn another_recipe_than_the_files_have_is_told() {
    let dir = tempfile::tempdir().unwrap();
    let [rowwise, mx] = [Recipe::Rowwise, Recipe::Mxfp8].map(|recipe| {
        let folder = dir.path().join(recipe.to_string());
        export(&model(square(false), 12), recipe, &folder).unwrap();
        folder
    });
    let anew = "has FP8 weights of rowwise, which are decoded and requantized";
    for (recipe, fp8_only, told) in [
        (Recipe::Rowwise, true, ""),
        (Recipe::RowwiseWithGwHp, true, ""),
        (Recipe::Tensorwise, true, " by tensorwise; to keep them: float8.recipe = \"rowwise\"\n"),
        (Recipe::Rowwise, false, "\n"),
        (Recipe::Tensorwise, false, " by tensorwise\n"),
    ] {
        let (_, out) = prepared(&rowwise, recipe, fp8_only, &[]);
        assert_eq!(out.contains(anew), !told.is_empty(), "{recipe} {fp8_only}: {out}");
        assert!(told.is_empty() || out.contains(&format!("{anew}{told}")), "{recipe} {fp8_only}: {out}");
    }
    let (_, out) = prepared(&mx, Recipe::Mxfp8, true, &["float8.mx_square_weights=true"]);
    assert!(out.contains("warning: float8.mx_square_weights: the codes of layers.0."), "{out}");
}

/// Histories of `delayed` scale the codes of a run too.
#[test]
fn codes_of_a_delayed_run_are_cast_by_its_histories() {
    let (data, dir) = (text(), tempfile::tempdir().unwrap());
    let folder = dir.path().join("run");
    let saved = saved(&folder);
    let settings =
        ["training.steps=3", "generate.max_new_tokens=0", "float8.recipe=delayed", "optimizer.lr=0.05", &saved];
    run(&run_config(data.path(), &settings)).unwrap();
    let loss = |flags: &[&str]| printed_loss(&float8(&[&["eval", folder.to_str().unwrap()], flags].concat()).unwrap());
    let plain = loss(&[]);
    assert_eq!(plain, loss(&["--fp8-weights"]));
    assert_ne!(plain, loss(&["--precision", "f32"]));
}

/// Input scales of a folder are used in its linears' casts.
#[test]
fn static_scales_of_inputs_are_used() {
    let dir = tempfile::tempdir().unwrap();
    crate::float8_python::write(dir.path());
    let folder = dir.path().join("delayed");
    for fp8_only in [true, false] {
        let model = prepared(&folder, Recipe::Delayed, fp8_only, &[]).0.valid();
        for _ in 0..2 {
            model.forward(ids(&tokens([2, 16], 288, 6), [2, 16]));
        }
        let files = TensorFiles::open_folder(&folder).unwrap();
        for layer in report(&model).layers.iter().filter(|layer| layer.is_float8) {
            let stored = files.get(&format!("model.{}.input_scale", layer.name)).unwrap().to_f32().unwrap()[0];
            let used = layer.fprop.operands[0].scale.unwrap();
            assert!((used * stored - 1.0).abs() < 1e-6, "{}: {used} for {stored}", layer.name);
        }
    }
}
