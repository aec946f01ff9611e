//! FP8 checkpoints of other programs: every form of scales, names and lists.

use std::collections::BTreeMap;
use std::fs;

use burn::backend::Flex;
use burn::tensor::{bf16, f16};
use burn_float8::Recipe;

use llama3::{CausalLmExt, Error, Llama};
use safetensors::Dtype;
use serde_json::{Value, json};
use tempfile::TempDir;
use train::TensorFiles;
use train::hf::Float8FilesError;

use crate::common::{Stored, model, text, write_json, write_safetensors};
use crate::float8_exports::{export, json_file, llama3, square};

/// Linear that the tests modify.
pub(crate) const LINEAR: &str = "model.layers.0.mlp.up_proj";

/// Checkpoint in memory.
#[derive(Clone)]
pub(crate) struct Files {
    pub(crate) json: Value,
    pub(crate) tensors: BTreeMap<String, Stored>,
}

impl Files {
    /// Square model with this recipe.
    pub(crate) fn new(recipe: Recipe) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let folder = dir.path().join("out");
        export(&model::<Flex>(square(false), 8), recipe, &folder).unwrap();
        let files = TensorFiles::open_folder(&folder).unwrap();
        let stored = |name: &str| {
            let tensor = files.get(name).unwrap();
            let (dtype, shape, bytes) = (tensor.dtype(), tensor.shape().to_vec(), tensor.bytes().unwrap());
            (name.to_string(), Stored { name: name.into(), dtype, shape, bytes })
        };
        Self { json: json_file(&folder.join("config.json")), tensors: files.names().map(stored).collect() }
    }

    pub(crate) fn quantization(&mut self) -> &mut Value {
        &mut self.json["quantization_config"]
    }

    pub(crate) fn of(&mut self, own: &str) -> &mut Stored {
        self.tensors.get_mut(&format!("{LINEAR}.{own}")).unwrap()
    }

    /// Replaces the ending `from` of tensor names by `to`.
    fn rename(&mut self, from: &str, to: &str) {
        let renamed = |(name, stored): (String, Stored)| {
            let name = name.strip_suffix(from).map_or(name.clone(), |begin| format!("{begin}{to}"));
            (name.clone(), Stored { name, ..stored })
        };
        self.tensors = std::mem::take(&mut self.tensors).into_iter().map(renamed).collect();
    }

    /// Changes every scale tensor.
    fn change_scales(&mut self, change: impl Fn(&mut Stored)) {
        self.tensors.values_mut().filter(|stored| stored.name.contains("weight_scale")).for_each(change);
    }

    pub(crate) fn folder(&self) -> TempDir {
        let dir = tempfile::tempdir().unwrap();
        write_json(&dir.path().join("config.json"), &self.json);
        write_safetensors(&dir.path().join("model.safetensors"), &self.tensors.values().cloned().collect::<Vec<_>>());
        dir
    }

    pub(crate) fn load(&self) -> Result<Llama<Flex>, Error> {
        Llama::load_hf(self.folder().path(), &Default::default())
    }

    /// Bits of the model's parameters.
    pub(crate) fn bits(&self) -> Vec<u32> {
        bits(&self.load().unwrap_or_else(|error| panic!("{error}")))
    }

    pub(crate) fn error(&self) -> Error {
        self.load().map(drop).expect_err("it was to be refused")
    }

    /// Error of the FP8 weights.
    pub(crate) fn float8_error(&self) -> Float8FilesError {
        match self.error() {
            Error::Float8Files(error) => error,
            other => panic!("{other}"),
        }
    }
}

fn bits(model: &Llama<Flex>) -> Vec<u32> {
    use burn::module::{Module, ModuleVisitor, Param};
    use burn::tensor::Tensor;
    struct Collect(Vec<u32>);
    impl ModuleVisitor<Flex> for Collect {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<Flex, D>>) {
            self.0.extend(crate::common::values(param.val()).into_iter().map(f32::to_bits));
        }
    }
    let mut collect = Collect(Vec::new());
    model.visit(&mut collect);
    collect.0
}

/// Converts f32 scales to a narrower dtype. Powers of two, as in rowwise, stay exact.
fn narrowed(stored: &mut Stored, dtype: Dtype) {
    let values = stored.bytes.as_chunks::<4>().0.iter().map(|bytes| f32::from_le_bytes(*bytes));
    stored.bytes = match dtype {
        Dtype::BF16 => values.flat_map(|value| bf16::from_f32(value).to_le_bytes()).collect(),
        _ => values.flat_map(|value| f16::from_f32(value).to_le_bytes()).collect(),
    };
    stored.dtype = dtype;
}

#[test]
fn scales_may_be_narrower_and_have_other_shapes_and_names() {
    let rowwise = Files::new(Recipe::Rowwise);
    for dtype in [Dtype::BF16, Dtype::F16] {
        let mut files = rowwise.clone();
        files.change_scales(|stored| narrowed(stored, dtype));
        assert!(files.bits() == rowwise.bits(), "{dtype:?}");
    }
    let tensorwise = Files::new(Recipe::Tensorwise);
    let expected = tensorwise.bits();
    let mut scalars = tensorwise.clone();
    scalars.change_scales(|stored| stored.shape = vec![]);
    assert!(scalars.bits() == expected);

    // Names of vLLM and of transformers, with and without input scales.
    for (weight, input) in [("weight_scale", "input_scale"), ("weight_scale_inv", "activation_scale")] {
        for scheme in ["dynamic", "static"] {
            for blocks in [json!({}), json!({"weight_block_size": null})] {
                let mut files = tensorwise.clone();
                files.rename("weight_scale", weight);
                *files.quantization() =
                    json!({"quant_method": "fp8", "activation_scheme": scheme, "ignored_layers": ["lm_head"]});
                files.quantization().as_object_mut().unwrap().extend(blocks.as_object().unwrap().clone());
                let scales: Vec<_> =
                    files.tensors.keys().filter_map(|name| name.strip_suffix(weight)).map(String::from).collect();
                for linear in scales.iter().filter(|_| scheme == "static") {
                    let name = format!("{linear}{input}");
                    files.tensors.insert(name.clone(), Stored::f32(&name, &[], &[0.5]));
                }
                assert!(files.bits() == expected, "{weight} {scheme}");
                if scheme == "static" {
                    let name = format!("{LINEAR}.{input}");
                    files.tensors.remove(&name);
                    let error = files.float8_error();
                    let Float8FilesError::ScaleMissing { name, .. } = &error else { panic!("{error}") };
                    assert_eq!(name, &format!("{LINEAR}.weight"));
                }
            }
        }
    }
}

/// An input scale is ignored for dynamically scaled inputs, and kept in another export.
#[test]
fn scales_of_inputs_that_scale_themselves_are_kept() {
    for recipe in [Recipe::Tensorwise, Recipe::Rowwise] {
        let plain = Files::new(recipe);
        let mut files = plain.clone();
        let name = format!("{LINEAR}.input_scale");
        files.tensors.insert(name.clone(), Stored::f32(&name, &[1], &[0.5]));
        assert!(files.bits() == plain.bits());
        let (from, dir) = (files.folder(), tempfile::tempdir().unwrap());
        let to = dir.path().join("again");
        let said = llama3(&["export", from.path().to_str().unwrap(), to.to_str().unwrap(), "--format", "fp8"]).unwrap();
        assert!(!said.contains("static"), "{said}");
        let again = TensorFiles::open_folder(&to).unwrap();
        assert_eq!(again.names().collect::<Vec<_>>(), files.tensors.keys().collect::<Vec<_>>(), "{recipe}");
        for (name, stored) in &files.tensors {
            let found = again.get(name).unwrap();
            let is_float8 = !matches!(stored.dtype, Dtype::BF16);
            assert!(
                !is_float8 || (found.bytes().unwrap(), found.dtype()) == (stored.bytes.clone(), stored.dtype),
                "{name}"
            );
        }
        assert_eq!(json_file(&to.join("config.json"))["quantization_config"], files.json["quantization_config"]);
    }
}

/// Inputs in high precision, or cast in another way than by our recipes. An export keeps the files'
/// settings, an evaluation reports them, and a folder with mixed settings is not exported.
#[test]
fn inputs_that_recipes_cast_otherwise_are_kept() {
    let of = |strategy: &str| json!({"num_bits": 8, "type": "float", "strategy": strategy, "dynamic": true, "symmetric": true});
    let (group, data) = ("/quantization_config/config_groups/group_0", text());
    for (recipe, inputs, said) in [
        (Recipe::Rowwise, Value::Null, "rowwise weights with inputs in high precision"),
        (Recipe::Rowwise, of("tensor"), "rowwise weights with tensorwise inputs"),
        (Recipe::Tensorwise, of("token"), "tensorwise weights with rowwise inputs"),
        (Recipe::Tensorwise, Value::Null, "tensorwise weights with inputs in high precision"),
        (Recipe::Mxfp8, of("token"), "1x32 weights with rowwise inputs"),
    ] {
        let mut files = Files::new(recipe);
        files.json.pointer_mut(group).unwrap()["input_activations"] = inputs.clone();
        let (from, dir) = (files.folder(), tempfile::tempdir().unwrap());
        let (to, other) = (dir.path().join("again"), dir.path().join("other"));
        let (from, again) = (from.path().to_str().unwrap(), to.to_str().unwrap());
        let out = llama3(&["export", from, again, "--format", "fp8"]).unwrap();
        assert!(out.contains(said) && out.contains("14 keep their codes"), "{out}");
        let found = json_file(&to.join("config.json")).pointer(group).unwrap()["input_activations"].clone();
        assert_eq!(found, inputs, "{recipe}");
        let again = TensorFiles::open_folder(&to).unwrap();
        for (name, stored) in files.tensors.iter().filter(|(_, stored)| stored.dtype != Dtype::BF16) {
            assert!(again.get(name).unwrap().bytes().unwrap() == stored.bytes, "{recipe} {name}");
        }
        let data = data.path().to_str().unwrap();
        let settings = ["--set", "data.tokenizer=bytes", "--set", "training.seq_len=24"];
        let out = llama3(&[&["eval", from, "--data", data], &settings[..]].concat()).unwrap();
        assert!(out.contains(&format!("as {said}; here inputs are cast by {recipe}")), "{out}");
        let out =
            llama3(&["export", from, other.to_str().unwrap(), "--format", "fp8", "--recipe", "blockwise"]).unwrap();
        assert!(out.contains("128x128 weights; 14 are decoded and cast anew"), "{out}");
    }
    let mut mixed = Files::new(Recipe::Rowwise);
    let mut other = mixed.json.pointer(group).unwrap().clone();
    (other["targets"], other["input_activations"]) = (json!([LINEAR]), Value::Null);
    mixed.quantization()["config_groups"]["group_1"] = other;
    let (from, dir) = (mixed.folder(), tempfile::tempdir().unwrap());
    let to = dir.path().join("again");
    let error =
        llama3(&["export", from.path().to_str().unwrap(), to.to_str().unwrap(), "--format", "fp8"]).unwrap_err();
    assert!(matches!(error, Error::Float8Files(Float8FilesError::Mixed { .. })), "{error}");
}

#[test]
fn blocks_and_mx_have_other_names_too() {
    let blockwise = Files::new(Recipe::Blockwise);
    let expected = blockwise.bits();
    let mut files = blockwise.clone();
    files.rename("weight_scale_inv", "weight_scale");
    *files.quantization() = json!({
        "quant_method": "compressed-tensors", "format": "float-quantized", "ignore": ["lm_head"],
        "config_groups": {"group_0": {"targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128]},
            "input_activations": {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 128, "dynamic": true}}},
    });
    assert!(files.bits() == expected, "compressed-tensors' blocks");
    // Blocks are transformers' default.
    let mut files = blockwise.clone();
    files.quantization().as_object_mut().unwrap().remove("weight_block_size");
    assert!(files.bits() == expected, "no weight_block_size");
    // The output layer is in high precision but not in a list, as in DeepSeek's files.
    files.quantization().as_object_mut().unwrap().remove("modules_to_not_convert");
    assert!(files.bits() == expected, "no list");

    let mxfp8 = Files::new(Recipe::Mxfp8);
    let mut files = mxfp8.clone();
    files.change_scales(|stored| stored.dtype = Dtype::F8_E8M0);
    assert!(files.bits() == mxfp8.bits());
}

/// Our schemes in the terms of other programs.
#[test]
fn other_programs_write_the_same_schemes() {
    let [tensorwise, rowwise, blockwise] = [Recipe::Tensorwise, Recipe::Rowwise, Recipe::Blockwise].map(Files::new);
    let mut with_inputs = tensorwise.clone();
    for name in tensorwise.tensors.keys().filter_map(|name| name.strip_suffix("weight_scale")) {
        let name = format!("{name}input_scale");
        with_inputs.tensors.insert(name.clone(), Stored::f32(&name, &[], &[0.5]));
    }
    let quark = |scheme: &str| {
        let all = |is_dynamic| json!({"dtype": "fp8_e4m3", "qscheme": scheme, "is_dynamic": is_dynamic});
        let layer = json!({"weight": all(false), "input_tensors": all(true), "output_tensors": all(false)});
        json!({"quant_method": "quark", "global_quant_config": {"weight": all(false), "input_tensors": all(true)},
               "layer_quant_config": {"*k_proj": layer}, "exclude": ["lm_head"]})
    };
    let modelopt =
        json!({"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head", "*.router*"]});
    let fp8 =
        json!({"quant_method": "fp8", "fmt": "float8_e4m3fn", "scale_fmt": "ue8m0", "weight_block_size": [128, 128]});
    for (of, config) in [
        (&blockwise, fp8),
        (&rowwise, json!({"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0, "modules_to_not_convert": []})),
        (
            &rowwise,
            json!({"quant_method": "modelopt", "quant_algo": "FP8_PER_CHANNEL_PER_TOKEN", "ignore": ["lm_head"]}),
        ),
        (&rowwise, quark("per_channel")),
        (&tensorwise, quark("per_tensor")),
        (&with_inputs, modelopt.clone()),
    ] {
        let mut files = of.clone();
        *files.quantization() = config.clone();
        if config["quant_method"] != "fp8" {
            files.change_scales(|stored| stored.shape.truncate(1));
        }
        assert!(files.bits() == of.bits(), "{config}");
    }
    // The older key of compressed-tensors, and a file next to config.json.
    let mut older = rowwise.clone();
    let config = older.json.as_object_mut().unwrap().remove("quantization_config").unwrap();
    older.json["compression_config"] = config;
    assert!(older.bits() == rowwise.bits());
    older.json["compression_config"]["config_groups"]["group_0"]["weights"]["num_bits"] = json!(4);
    let error = older.error().to_string();
    assert!(error.contains("compression_config.config_groups.*.weights.num_bits = 4"), "{error}");
    with_inputs.json.as_object_mut().unwrap().remove("quantization_config");
    let folder = with_inputs.folder();
    write_json(&folder.path().join("hf_quant_config.json"), &json!({"quantization": modelopt}));
    assert!(bits(&Llama::load_hf(folder.path(), &Default::default()).unwrap()) == tensorwise.bits());
    // A pattern that names linears without codes.
    let mut ignored = rowwise.clone();
    *ignored.quantization() =
        json!({"quant_algo": "FP8_PER_CHANNEL_PER_TOKEN", "exclude_modules": ["model.layers.1*.mlp"]});
    let error = ignored.float8_error();
    let Float8FilesError::NotQuantized { module, .. } = &error else { panic!("{error}") };
    assert_eq!(module, "model.layers.1.mlp.gate_proj");
}

/// A scale of 0 with zero codes is valid, and block scales may be bytes.
#[test]
fn zeros_and_powers_of_two_are_scales() {
    let mut files = Files::new(Recipe::Rowwise);
    files.of("weight").bytes[2 * 128..3 * 128].fill(0x80);
    let expected = files.bits();
    files.of("weight_scale").bytes[8..12].copy_from_slice(&0.0_f32.to_le_bytes());
    assert!(files.bits() == expected);
    let [mut numbers, mut bytes] = [(); 2].map(|()| Files::new(Recipe::Blockwise));
    numbers.change_scales(|stored| stored.bytes = 0.25_f32.to_le_bytes().repeat(stored.bytes.len() / 4));
    bytes.change_scales(|stored| (stored.dtype, stored.bytes) = (Dtype::F8_E8M0, vec![125; stored.bytes.len() / 4]));
    assert!(bytes.bits() == numbers.bits());
}

/// The log names these scales, and an export does not write them.
#[test]
fn scales_of_caches_are_not_used() {
    let plain = Files::new(Recipe::Rowwise);
    let mut files = plain.clone();
    files.quantization()["kv_cache_scheme"] = json!({"num_bits": 8, "type": "float", "strategy": "tensor"});
    for own in ["self_attn.k_scale", "self_attn.v_scale", "self_attn.k_proj.k_scale"] {
        let name = format!("model.layers.0.{own}");
        files.tensors.insert(name.clone(), Stored::f32(&name, &[], &[0.5]));
    }
    assert!(files.bits() == plain.bits());
    let (from, dir) = (files.folder(), tempfile::tempdir().unwrap());
    let to = dir.path().join("again");
    let out = llama3(&["export", from.path().to_str().unwrap(), to.to_str().unwrap(), "--format", "fp8"]).unwrap();
    assert!(out.contains("model.layers.0.self_attn.k_proj.k_scale and 2 more of its kind are not used"), "{out}");
    let again = TensorFiles::open_folder(&to).unwrap();
    assert!(again.names().eq(plain.tensors.keys()));
}

/// In lists of compressed-tensors an entry is a name, or a pattern after `re:`. In lists of
/// transformers it is a part of a name.
#[test]
fn linears_that_are_not_quantized_are_named_or_matched() {
    let mut rowwise = Files::new(Recipe::Rowwise);
    let plain = Stored::f32(&format!("{LINEAR}.weight"), &[256, 128], &vec![0.25; 256 * 128]);
    rowwise.tensors.remove(&format!("{LINEAR}.weight_scale"));
    rowwise.tensors.insert(plain.name.clone(), plain);
    let expected = rowwise.bits();
    let accepted = [
        json!([LINEAR, "lm_head"]),
        json!(["re:.*lm_head", "re:model\\.layers\\.0\\.mlp\\.up_proj$"]),
        json!(["lm_head", "re:.*\\.0\\.(?!self_attn).*up_proj"]),
        // Linears in high precision in the files are read as such.
        json!([]),
        Value::Null,
    ];
    for ignore in accepted {
        rowwise.quantization()["ignore"] = ignore.clone();
        assert!(rowwise.bits() == expected, "{ignore}");
    }
    // Codes without scales, with either kind of list.
    for ignore in [json!(["re:.*mlp.*"]), json!(["Linear"]), json!(["model.layers.0.mlp.gate_proj"])] {
        rowwise.quantization()["ignore"] = ignore.clone();
        let error = rowwise.float8_error();
        let Float8FilesError::NotQuantized { path, module, .. } = &error else { panic!("{error}") };
        assert!(path.ends_with("model.safetensors") && module.starts_with("model.layers.0."), "{ignore}: {module}");
    }
    rowwise.quantization()["ignore"] = json!(["re:(lm_head"]);
    let error = rowwise.float8_error();
    assert!(matches!(&error, Float8FilesError::Pattern { pattern, .. } if pattern == "(lm_head"), "{error}");

    let mut blockwise = Files::new(Recipe::Blockwise);
    for (list, module) in [
        (json!(["lm_head", "up_proj"]), Some(LINEAR)),
        (json!(["lm_head", "model.layers.0"]), Some("model.layers.0.self_attn.q_proj")),
        (json!(["lm_head", "model.layers.*.mlp.up"]), None),
        (json!(["lm_head", "re:.*\\.1\\.mlp"]), Some("model.layers.1.mlp.gate_proj")),
        (json!(["model.layers.11", "layers.0.mlp.up"]), None),
    ] {
        for key in ["modules_to_not_convert", "ignored_layers"] {
            *blockwise.quantization() = json!({"quant_method": "fp8", "weight_block_size": [128, 128], key: list});
            match (blockwise.load(), module) {
                (Ok(_), None) => {}
                (Err(Error::Float8Files(Float8FilesError::NotQuantized { module, .. })), Some(expected)) => {
                    assert_eq!(module, expected, "{list}");
                }
                (other, _) => panic!("{list}: {:?}", other.map(drop)),
            }
        }
    }
}

/// A folder with linears in several formats runs unchanged, and is exported only in one format.
#[test]
fn several_formats_run_as_they_are() {
    let (mut files, rowwise, data) = (Files::new(Recipe::Tensorwise), Files::new(Recipe::Rowwise), text());
    for own in ["weight", "weight_scale"] {
        let name = format!("{LINEAR}.{own}");
        files.tensors.insert(name.clone(), rowwise.tensors[&name].clone());
    }
    let mut channel = rowwise.json["quantization_config"]["config_groups"]["group_0"].clone();
    channel["targets"] = json!([LINEAR]);
    files.quantization()["config_groups"]["group_1"] = channel;
    let (from, dir) = (files.folder(), tempfile::tempdir().unwrap());
    let (from, data) = (from.path().to_str().unwrap(), data.path().to_str().unwrap());
    let settings = ["--data", data, "--set", "data.tokenizer=bytes", "--set", "training.seq_len=24"];
    let eval = |more: &[&str]| llama3(&[&["eval", from], &settings[..], more].concat()).unwrap();
    let out = eval(&[]);
    assert!(out.contains("precision: fp8") && out.contains("FP8-only weights: 14 of"), "{out}");
    assert!(!out.contains("cast anew"), "{out}");
    let out = eval(&["--set", "float8.recipe=rowwise"]);
    let note = "has FP8 weights in several formats, 13 of which, the first layers.0.self_attn.q_proj, are decoded and cast anew by rowwise\n";
    assert!(out.contains(note), "{out}");
    let export = |to: &str, more: &[&str]| {
        llama3(&[&["export", from, dir.path().join(to).to_str().unwrap(), "--format", "fp8"], more].concat())
    };
    let error = export("again", &[]).unwrap_err();
    assert!(matches!(error, Error::Float8Files(Float8FilesError::Mixed { .. })), "{error}");
    let out = export("one", &["--recipe", "rowwise"]).unwrap();
    assert!(out.contains("rowwise weights; 14 are decoded and cast anew"), "{out}");
}

/// The most specific matching group counts.
#[test]
fn groups_name_their_linears() {
    let (mut files, rowwise) = (Files::new(Recipe::Tensorwise), Files::new(Recipe::Rowwise));
    let expected = rowwise.load().unwrap();
    for own in ["weight", "weight_scale"] {
        let name = format!("{LINEAR}.{own}");
        files.tensors.insert(name.clone(), rowwise.tensors[&name].clone());
    }
    let group = |files: &Files| files.json["quantization_config"]["config_groups"]["group_0"].clone();
    let (tensor, mut channel) = (group(&files), group(&rowwise));
    for target in [LINEAR, "re:.*layers\\.0\\.mlp\\.up_proj"] {
        channel["targets"] = json!([target]);
        files.quantization()["config_groups"] = json!({"group_0": tensor, "group_1": channel});
        let up =
            |model: &Llama<Flex>| crate::common::values(model.layers[0].mlp.as_ref().unwrap().up_proj.weight.val());
        assert!(up(&files.load().unwrap()) == up(&expected), "{target}");
    }
    files.quantization()["config_groups"] = json!({"group_1": channel});
    let error = files.float8_error();
    assert!(matches!(&error, Float8FilesError::NotQuantized { .. }), "{error}");
}

#[test]
fn shards_and_tied_output_layers_are_read() {
    let files = Files::new(Recipe::Mxfp8);
    let dir = tempfile::tempdir().unwrap();
    write_json(&dir.path().join("config.json"), &files.json);
    let all: Vec<_> = files.tensors.values().cloned().collect();
    let mut weight_map = serde_json::Map::new();
    for (i, shard) in all.chunks(10).enumerate() {
        let file = format!("model-{:05}-of-00004.safetensors", i + 1);
        write_safetensors(&dir.path().join(&file), shard);
        weight_map.extend(shard.iter().map(|stored| (stored.name.clone(), json!(file))));
    }
    let index = dir.path().join("model.safetensors.index.json");
    write_json(&index, &json!({"metadata": {}, "weight_map": weight_map}));
    let load = || Llama::<Flex>::load_hf(dir.path(), &Default::default());
    assert!(bits(&load().unwrap()) == files.bits());

    // A tensor in two shards, then a missing shard.
    let (one, other) = (dir.path().join("model-00001-of-00004.safetensors"), &all[10]);
    write_safetensors(&one, &[&all[..10], std::slice::from_ref(other)].concat());
    let error = load().map(drop).unwrap_err().to_string();
    assert!(error.contains(&other.name) && error.contains("00001") && error.contains("00002"), "{error}");
    fs::remove_file(&one).unwrap();
    let error = load().map(drop).unwrap_err().to_string();
    assert!(error.contains("model-00001-of-00004.safetensors"), "{error}");
}
