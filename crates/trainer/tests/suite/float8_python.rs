//! FP8 checkpoints in other programs: compressed-tensors' dequantizer returns our weights bit for
//! bit, and transformers loads blocks.
//!
//! `float8_vectors.py` has written `vectors/float8.safetensors` from the folders that this test
//! exports. If Python has the packages, the script reads the folders again.

use crate::common::*;
use crate::float8_exports::{config, linears, options, square};

/// Every row of the table of formats.
const RECIPES: [Recipe; 5] = [Recipe::Tensorwise, Recipe::Delayed, Recipe::Rowwise, Recipe::Blockwise, Recipe::Mxfp8];

fn vectors() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/vectors/float8.safetensors")
}

/// Amax histories after a step. Most weights are slightly smaller than their amax, so they do not
/// saturate; one linear does.
fn state() -> Float8State {
    let amax = |amax: f32| json!({"history": [], "scaling_amax": null, "observed": [amax.to_bits()]});
    let scaling = json!({"amax_history_len": 1024, "amax_compute_algo": "max", "margin": 0});
    let linears = linears(&model(square(false), 12)).into_iter().enumerate().map(|(i, (name, _))| {
        let weight = amax(if name.ends_with("down_proj") { 0.03 } else { 0.1 + 0.01 * (i % 7) as f32 });
        let state = json!({"delayed_scaling": scaling, "input": amax(3.0 + (i % 7) as f32), "weight": weight});
        (name["model.".len()..].to_string(), state)
    });
    let layers: BTreeMap<String, Value> = linears.collect();
    serde_json::from_value(json!({"step": 1, "has_begun": false, "layers": layers})).unwrap()
}

/// Writes folders of the same model, by recipe.
pub(crate) fn write(folder: &Path) {
    let model = model::<Flex>(square(false), 12);
    let state = state();
    for recipe in RECIPES {
        let config = config(recipe, model.config());
        let export = Float8Export::new(&config).with_state(&state);
        model.save_hf_float8(folder.join(recipe.to_string()), &options(), &export).unwrap();
    }
}

/// Digest of the weights of all FP8 linears, `[out, in]` in f32, sorted by name.
fn digest(model: &Decoder<Flex>) -> String {
    let mut all = linears(model);
    all.sort_by(|(one, _), (other, _)| one.cmp(other));
    let mut digest = Sha256::new();
    for (_, weight) in all {
        let bytes: Vec<u8> = values(weight.transpose()).into_iter().flat_map(f32::to_le_bytes).collect();
        digest.update(bytes);
    }
    digest.finalize().iter().map(|byte| format!("{byte:02x}")).collect()
}

#[test]
fn compressed_tensors_and_transformers_read_our_weights() {
    if let Some(folder) = env::var_os("FLOAT8_EXPORT_VECTORS") {
        return write(Path::new(&folder));
    }
    let dir = tempfile::tempdir().unwrap();
    write(dir.path());
    let mut found = BTreeMap::new();
    for recipe in RECIPES {
        let folder = dir.path().join(recipe.to_string());
        let imported = Decoder::<Flex>::load_hf(&folder, &Default::default()).unwrap();
        found.insert(recipe.to_string(), digest_of_file(&folder.join("model.safetensors")).unwrap());
        found.insert(format!("{recipe} weights"), digest(&imported));
    }
    assert_eq!(found, metadata(&vectors()), "files or weights are others than compressed-tensors has read");

    let blockwise = Decoder::<Flex>::load_hf(dir.path().join("blockwise"), &Default::default()).unwrap();
    check_logits(&vectors(), &blockwise, 2e-6);

    run_python(
        "float8_vectors.py",
        "accelerate, compressed_tensors, transformers",
        &["--check".as_ref(), dir.path().as_os_str()],
    );
}

/// Runs a script of `tests` and requires success, if Python (`FLOAT8_PYTHON`, else `python3`) has
/// these packages.
pub(crate) fn run_python(script: &str, packages: &str, arguments: &[&OsStr]) {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests").join(script);
    let python = env::var_os("FLOAT8_PYTHON").unwrap_or_else(|| "python3".into());
    let has_packages = std::process::Command::new(&python).args(["-c", &format!("import {packages}")]).output();
    if !has_packages.is_ok_and(|output| output.status.success()) {
        let is_asked_for = env::var_os("FLOAT8_PYTHON").is_some();
        assert!(!is_asked_for, "FLOAT8_PYTHON is no Python with the packages of {}", script.display());
        return test_data::skip_optional(&format!("FLOAT8_PYTHON, a Python with {packages}"));
    }
    let output = std::process::Command::new(&python).arg(&script).args(arguments).output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}");
    println!("{said}");
}
