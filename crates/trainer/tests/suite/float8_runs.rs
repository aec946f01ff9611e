//! FP8 exports of runs: the same bytes after import and export, and the scales of delayed scaling.

use crate::common::*;
use crate::float8_exports::{contents, fused, json_file};

/// Run of the square model with this recipe, and its checkpoint folder.
fn trained(recipe: Recipe, more: &[&str], data: &Path, folder: &Path) -> RunConfig {
    let recipe = format!("float8.recipe={recipe}");
    let model = "model.overrides={ vocab_size = 288, hidden_size = 128, intermediate_size = 256, num_hidden_layers = 2, \
                 num_attention_heads = 8, num_key_value_heads = 4, head_dim = 32 }";
    let settings = [model, "training.steps=3", "training.precision=fp8", "generate.max_new_tokens=0", &recipe];
    let mut config = run_config(data, &[&settings, more].concat());
    config.checkpoint.output_dir = Some(folder.into());
    run(&config).unwrap();
    config
}

/// The default recipe is the run's, or an FP8 folder's, whose bits do not change. Covers sharded
/// folders too.
#[test]
fn export_import_export_gives_the_same_bytes() {
    let (data, dir) = (text(), tempfile::tempdir().unwrap());
    for recipe in [Recipe::Tensorwise, Recipe::Delayed, Recipe::Rowwise, Recipe::Blockwise, Recipe::Mxfp8] {
        let [run, first, second, third] =
            ["run", "first", "second", "third"].map(|name| dir.path().join(format!("{recipe}-{name}")));
        trained(recipe, &[], data.path(), &run);
        let out = exported(&run, &first, &["--format", "fp8"]).unwrap();
        assert!(out.contains("FP8: 14 of 15 linears") && out.contains("in high precision: lm_head"), "{out}");
        let out = exported(&first, &second, &["--format", "fp8"]).unwrap();
        assert!(out.contains("14 keep their codes"), "{recipe}: {out}");
        let (was, now) = (contents(&first), contents(&second));
        assert!(was == now, "{recipe}");
        let has_input_scales =
            TensorFiles::open_folder(&first).unwrap().names().any(|name| name.ends_with("input_scale"));
        assert_eq!(has_input_scales, recipe == Recipe::Delayed);

        exported(&first, &third, &["--format", "fp8", "--max-shard-size", "100KB"]).unwrap();
        let [one, shards] = [&first, &third].map(|folder| TensorFiles::open_folder(folder).unwrap());
        let tensors = |files: &TensorFiles| -> Vec<_> {
            files.names().map(|name| (name.to_string(), files.get(name).unwrap().bytes().unwrap())).collect()
        };
        assert!(tensors(&one) == tensors(&shards), "{recipe}");
        let index = json_file(&third.join("model.safetensors.index.json"));
        assert_eq!(index["metadata"]["total_size"], json!(one.num_bytes()));
        assert_eq!(index["weight_map"].as_object().unwrap().len(), one.names().count());
    }
}

/// With delayed scaling, an export uses the scales of the next step, like an evaluation.
#[test]
fn delayed_scales_are_those_of_the_next_step() {
    let scaling = "float8.delayed_scaling={ amax_history_len = 2, amax_compute_algo = \"most_recent\", margin = 1 }";
    for delayed in [&[][..], &[scaling]] {
        compare_delayed(delayed);
    }
}

fn compare_delayed(delayed: &[&str]) {
    let (data, dir) = (text(), tempfile::tempdir().unwrap());
    let (run, folder) = (dir.path().join("run"), dir.path().join("hf"));
    let config = trained(Recipe::Delayed, delayed, data.path(), &run);
    exported(&run, &folder, &["--format", "fp8"]).unwrap();

    let saved = SavedRun::open(&run, Which::Latest).unwrap();
    let weights = Weights::open(&config, Some(&saved), config.dimensions().unwrap()).unwrap();
    let (progress, out) = (ProgressLine::hidden(), &mut std::io::sink());
    let model = prepare::<Decoders, Train>(&config, weights, &Default::default(), &progress, out).unwrap();
    saved.restore_float8::<Train, _>(&model).unwrap();
    let model = model.valid();
    model.forward(ids(&tokens([2, 16], 288, 6), [2, 16]));
    let report = report(&model);
    let files = TensorFiles::open_folder(&folder).unwrap();
    let read = |name: String| files.get(&name).unwrap_or_else(|| panic!("{name}")).to_f32().unwrap()[0];
    let scale = |layer: &str, operand: usize| {
        let layer = report.layers.iter().find(|found| format!("model.{}", found.name) == layer).unwrap();
        layer.fprop.operands[operand].scale.unwrap()
    };
    let mut checked = 0;
    for layer in report.layers.iter().filter(|layer| layer.is_float8) {
        let name = format!("model.{}", layer.name);
        let parent = name.rsplit_once('.').unwrap().0;
        let least = |operand| {
            let scales = fused(&name).iter().map(|other| scale(&format!("{parent}.{other}"), operand));
            scales.reduce(f32::min).unwrap()
        };
        assert_eq!(read(format!("{name}.input_scale")), 1.0 / least(0), "{name}");
        assert_eq!(read(format!("{name}.weight_scale")), 1.0 / least(1), "{name}");
        checked += 1;
    }
    assert_eq!(checked, 14);
    let inputs =
        &json_file(&folder.join("config.json"))["quantization_config"]["config_groups"]["group_0"]["input_activations"];
    assert_eq!((&inputs["dynamic"], &inputs["strategy"]), (&json!(false), &json!("tensor")));
}
