//! FP8-only models from checkpoints: memory, results, and the checkpoint's input scales.

use crate::common::*;
use crate::float8_exports::{DYNAMIC, export, square};

/// Model of a folder with a recipe, FP8 only or with values.
fn prepared(folder: &Path, recipe: Recipe, fp8_only: bool) -> Result<Decoder<Train>, Error> {
    prepared_by(folder, recipe, fp8_only, &[], &mut std::io::sink())
}

fn prepared_by(
    folder: &Path,
    recipe: Recipe,
    fp8_only: bool,
    settings: &[&str],
    out: &mut dyn std::io::Write,
) -> Result<Decoder<Train>, Error> {
    let folder = format!("model.hf_path={}", folder.display());
    let mut settings: Vec<_> = settings.iter().map(|setting| setting.to_string()).collect();
    settings.extend([folder, format!("float8.recipe={recipe}"), "training.precision=fp8".into()]);
    let config = RunConfig { fp8_only, ..RunConfig::load(None, &settings)? };
    let weights = Weights::open(&config, None, config.dimensions()?)?;
    prepare::<Decoders, Train>(&config, weights, &Default::default(), &ProgressLine::hidden(), out)
}

fn logits(model: &Decoder<Train>) -> Vec<u32> {
    let logits = model.valid().forward(ids(&tokens([2, 16], 288, 6), [2, 16]));
    values(logits).into_iter().map(f32::to_bits).collect()
}

#[test]
fn logits_are_those_of_the_model_with_values() {
    let dir = tempfile::tempdir().unwrap();
    let tiny = model(square(false), 12);
    let plain = dir.path().join("f32");
    trainer::CausalLmExt::save_hf(&tiny, &plain, &trainer::ExportOptions::default()).unwrap();
    for recipe in Recipe::ALL {
        let [codes, full] = [true, false].map(|fp8_only| prepared(&plain, recipe, fp8_only).unwrap());
        assert!(logits(&codes) == logits(&full), "{recipe}");
        let count = |model: &Decoder<Train>| report(model).layers.iter().filter(|l| l.fp8_only.is_some()).count();
        assert_eq!((count(&codes), count(&full)), (14, 0), "{recipe}");
    }
    // Codes of a file are used unchanged. With power-of-two scales, a cast of their values gives
    // the same codes.
    for recipe in DYNAMIC {
        let folder = dir.path().join(recipe.to_string());
        export(&tiny, recipe, &folder).unwrap();
        let [codes, full] = [true, false].map(|fp8_only| prepared(&folder, recipe, fp8_only).unwrap());
        let files = TensorFiles::open_folder(&folder).unwrap();
        for (name, weight) in burn_float8::weights::read_codes::<Train, _>(&codes) {
            let stored = files.get(&format!("model.{name}.weight")).unwrap();
            assert!(stored.dtype() == Dtype::F8_E4M3 && stored.bytes().unwrap() == weight.codes, "{recipe} {name}");
        }
        assert!(
            logits(&codes) == logits(&full) || matches!(recipe, Recipe::Tensorwise | Recipe::Blockwise),
            "{recipe}"
        );
    }
}

/// Training FP8-only weights gives an error that names a layer, before anything is computed.
#[test]
fn training_codes_is_an_error_that_names_the_layer() {
    let (data, dir) = (text(), tempfile::tempdir().unwrap());
    export(&model(square(false), 12), Recipe::Rowwise, dir.path()).unwrap();
    let mut config =
        RunConfig { fp8_only: true, ..run_config(data.path(), &["float8.recipe=rowwise", "data.tokenizer=bytes"]) };
    config.model = trainer::ModelSection::of_folder(dir.path().into(), serde_json::Map::new());
    let named = Float8Error::Fp8OnlyTrained { layer: "layers.0.self_attn.q_proj".into() };
    assert_eq!(cause::<Float8Error, _>(run(&config)), named);
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
    let said = float8(&[
        "generate",
        folder,
        "--prompt",
        "fn",
        "--max-new-tokens",
        "4",
        "--temperature",
        "0",
        "--set",
        "data.tokenizer=bytes",
    ]);
    assert!(said.unwrap().starts_with("fn"));
}

/// Requantized codes are reported, with the recipe that keeps them.
#[test]
fn another_recipe_than_the_files_have_is_told() {
    let dir = tempfile::tempdir().unwrap();
    export(&model(square(false), 12), Recipe::Rowwise, dir.path()).unwrap();
    let keeps = "; to keep them: float8.recipe = \"rowwise\"\n";
    for (recipe, fp8_only, told) in [
        (Recipe::Rowwise, true, None),
        (Recipe::RowwiseWithGwHp, true, None),
        (Recipe::Tensorwise, true, Some(keeps)),
        (Recipe::Rowwise, false, Some("\n")),
        (Recipe::Tensorwise, false, Some("\n")),
    ] {
        let mut out = vec![];
        prepared_by(dir.path(), recipe, fp8_only, &[], &mut out).unwrap();
        let out = String::from_utf8(out).unwrap();
        let by = if recipe == Recipe::Rowwise { String::new() } else { format!(" by {recipe}") };
        let line = format!("has FP8 weights of rowwise, which are decoded and cast anew{by}");
        match told {
            Some(end) => assert!(out.contains(&(line + end)), "{recipe} {fp8_only}: {out}"),
            None => assert!(!out.contains(&line), "{recipe} {fp8_only}: {out}"),
        }
    }
}

/// Square blocks are requested, but the codes were cast with other scales.
#[test]
fn scales_that_are_no_squares_are_told() {
    let (dir, mut out) = (tempfile::tempdir().unwrap(), vec![]);
    export(&model(square(false), 12), Recipe::Mxfp8, dir.path()).unwrap();
    prepared_by(dir.path(), Recipe::Mxfp8, true, &["float8.mx_square_weights=true"], &mut out).unwrap();
    let out = String::from_utf8(out).unwrap();
    assert!(out.contains("warning: float8.mx_square_weights: the codes of layers.0."), "{out}");
}

/// Histories of `delayed` scale the codes of a run too.
#[test]
fn codes_of_a_delayed_run_are_cast_by_its_histories() {
    let (data, dir) = (text(), tempfile::tempdir().unwrap());
    let folder = dir.path().join("run");
    let saved = format!("checkpoint.output_dir={}", folder.display());
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
        let model = prepared(&folder, Recipe::Delayed, fp8_only).unwrap().valid();
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
