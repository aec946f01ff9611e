//! Checkpoints that run as FP8 codes alone: their memory, what they give, and the scales of inputs that they bring.

use std::env;
use std::path::Path;

use burn::module::AutodiffModule;
use burn_float8::{Recipe, report};
use llama3::{Error, Llama, Llama3, RunConfig};
use safetensors::Dtype;
use train::ProgressLine;
use train::TensorFiles;
use train::job::{Weights, prepare};
use train::tensor_files::{NewTensor, write_shards};

use crate::common::{Train, hf_json, ids, model, run_alone, tensor_shapes, text, tokens, values, write_json};
use crate::float8_exports::{DYNAMIC, export, llama3, square};
use crate::import_memory::{status, wide};

const VARIABLE: &str = "FLOAT8_TEST_FP8_ONLY";

/// A folder's model by a recipe, with its weights as codes alone or with their values.
fn prepared(folder: &Path, recipe: Recipe, fp8_only: bool) -> Result<Llama<Train>, Error> {
    let folder = format!("model.hf_path={}", folder.display());
    let settings = [folder, format!("float8.recipe={recipe}"), "training.precision=fp8".into()];
    let config = RunConfig { fp8_only, ..RunConfig::load(None, &settings)? };
    let weights = Weights::open(&config, None, config.dimensions()?)?;
    let (progress, out) = (ProgressLine::hidden(), &mut std::io::sink());
    prepare::<Llama3, Train>(&config, weights, &Default::default(), &progress, out)
}

fn logits(model: &Llama<Train>) -> Vec<u32> {
    let logits = model.valid().forward(ids(&tokens([2, 16], 288, 6), [2, 16]));
    values(logits).into_iter().map(f32::to_bits).collect()
}

#[test]
fn logits_are_those_of_the_model_with_values() {
    let dir = tempfile::tempdir().unwrap();
    let tiny = model(square(false), 12);
    let plain = dir.path().join("f32");
    train::CausalLmExt::save_hf(&tiny, &plain, &train::ExportOptions::default()).unwrap();
    for recipe in Recipe::ALL {
        let [codes, full] = [true, false].map(|fp8_only| prepared(&plain, recipe, fp8_only).unwrap());
        assert!(logits(&codes) == logits(&full), "{recipe}");
        let count = |model: &Llama<Train>| report(model).layers.iter().filter(|l| l.fp8_only.is_some()).count();
        assert_eq!((count(&codes), count(&full)), (14, 0), "{recipe}");
    }
    // Codes of a file are taken as they are: where scales are powers of two, a cast of their values is the same.
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

#[test]
fn commands_run_a_folder_in_fp8_as_it_is() {
    let (data, dir) = (text(), tempfile::tempdir().unwrap());
    let data = data.path().to_str().unwrap();
    let folder = dir.path().join("fp8");
    export(&model(square(false), 12), Recipe::Rowwise, &folder).unwrap();
    let folder = folder.to_str().unwrap();
    let eval = |flags: &[&str]| {
        let fixed = ["eval", folder, "--data", data, "--set", "data.tokenizer=bytes", "--set", "training.seq_len=24"];
        let printed = llama3(&[&fixed, flags].concat()).unwrap();
        let (_, loss) = printed.split_once("held-out loss: ").expect(&printed);
        (loss.split_whitespace().next().unwrap().to_string(), printed)
    };
    let (own, printed) = eval(&[]);
    assert!(printed.contains("FP8 codes alone: 14 of 15 linears"), "{printed}");
    let (with_values, printed) = eval(&["--precision", "fp8"]);
    assert!(!printed.contains("codes alone"), "{printed}");
    assert_eq!(own, with_values);
    let (f32, _) = eval(&["--precision", "f32"]);
    assert_ne!(own, f32);
    let said = llama3(&[
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

/// Scales of inputs that a folder has are those of its linears' casts.
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

/// A folder in bf16 is cast as it is read, one in FP8 is read as it is: a tenth more than a byte for each parameter of a linear, and two
/// tensors while it loads.
#[test]
fn a_byte_for_each_parameter_also_while_loading() {
    if let Some(folder) = env::var_os(VARIABLE) {
        return measure(Path::new(&folder));
    }
    let dir = tempfile::tempdir().unwrap();
    let config = wide();
    let bf16 = dir.path().join("bf16");
    std::fs::create_dir(&bf16).unwrap();
    write_json(&bf16.join("config.json"), &hf_json(&config));
    let tensor = |(name, shape): (String, Vec<usize>)| {
        let bytes = shape.iter().product::<usize>() * 2;
        NewTensor { name, dtype: Dtype::BF16, shape, bytes: Box::new(move || Ok::<_, Error>(vec![0x3c; bytes])) }
    };
    let tensors: Vec<_> = tensor_shapes(&config).into_iter().map(tensor).collect();
    write_shards(&bf16, &tensors, 60_000_000).unwrap();
    let fp8 = dir.path().join("fp8");
    llama3(&[
        "export",
        bf16.to_str().unwrap(),
        fp8.to_str().unwrap(),
        "--format",
        "fp8",
        "--recipe",
        "rowwise",
        "--set",
        "data.tokenizer=bytes",
    ])
    .unwrap();
    for folder in [bf16, fp8] {
        run_alone("fp8_only::a_byte_for_each_parameter_also_while_loading", VARIABLE, &folder, None);
    }
}

fn measure(folder: &Path) {
    let config = wide();
    let largest = config.hidden_size * config.intermediate_size * 4;
    let tables = 2 * config.vocab_size * config.hidden_size;
    let linears = config.dims().num_params() - tables;
    let before = status("VmRSS:");
    let model = prepared(folder, Recipe::Rowwise, true).unwrap();
    let (now, peak) = (status("VmRSS:") - before, status("VmHWM:") - before);
    println!("linears: {linears}, the largest tensor in f32: {largest}, now: {now}, peak: {peak}");
    assert!(now >= linears, "the model itself was not seen");
    // Beside it the tables in f32.
    let allowed = linears + linears / 10 + 4 * tables;
    assert!(now <= allowed, "{now} bytes for {linears} parameters of linears, {tables} others");
    assert!(peak <= allowed + 2 * largest, "{peak} bytes at most");
    drop(model);
}
