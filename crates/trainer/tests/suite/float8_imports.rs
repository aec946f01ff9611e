//! FP8 checkpoints of other programs: every form of scales, names and lists, and what an export
//! keeps of it.

use std::collections::BTreeMap;

use anyhow::Error;
use burn::backend::Flex;
use burn::tensor::{bf16, f16};
use burn_float8::Recipe::{self, Blockwise, Mxfp8, Rowwise, Tensorwise};
use models::{CausalLmExt, Decoder};
use safetensors::Dtype;
use serde_json::{Value, json};
use tempfile::TempDir;
use trainer::TensorFiles;

use crate::common::{Stored, chain, float8, model, text, values, write_json, write_safetensors};
use crate::float8_exports::{DYNAMIC, export, json_file, linears, square};

/// Change of the tensors of a folder.
type Change<'a> = &'a dyn Fn(&mut Files);

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

    /// Adds a scale.
    fn add(&mut self, name: String) {
        self.tensors.insert(name.clone(), Stored::f32(&name, &[], &[0.5]));
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

    /// Replaces codes and scale of [`LINEAR`] by `other`'s.
    fn take(&mut self, other: &Self) {
        for name in ["weight", "weight_scale"].map(|own| format!("{LINEAR}.{own}")) {
            self.tensors.insert(name.clone(), other.tensors[&name].clone());
        }
    }

    pub(crate) fn folder(&self) -> TempDir {
        let dir = tempfile::tempdir().unwrap();
        write_json(&dir.path().join("config.json"), &self.json);
        write_safetensors(&dir.path().join("model.safetensors"), &self.tensors.values().cloned().collect::<Vec<_>>());
        dir
    }

    pub(crate) fn load(&self) -> Result<Decoder<Flex>, Error> {
        Decoder::load_hf(self.folder().path(), &Default::default())
    }

    /// Bits of the weights of linears, by name.
    fn weights(&self) -> BTreeMap<String, Vec<u32>> {
        weights(&self.load().unwrap_or_else(|error| panic!("{}", chain(error))))
    }

    pub(crate) fn error(&self) -> Error {
        self.load().map(drop).expect_err("it was to be refused")
    }

    /// Exports the checkpoint in FP8, and returns the log and the new folder.
    fn export(&self, flags: &[&str]) -> Result<(String, TempDir), Error> {
        let (from, to) = (self.folder(), tempfile::tempdir().unwrap());
        let folders =
            ["export", from.path().to_str().unwrap(), "--output", to.path().to_str().unwrap(), "--format", "fp8"];
        Ok((float8(&[&folders[..], flags].concat())?, to))
    }

    /// Log of an evaluation.
    fn eval(&self, flags: &[&str]) -> String {
        let (folder, data) = (self.folder(), text());
        let [folder, data] = [folder.path(), data.path()].map(|path| path.to_str().unwrap());
        let settings = ["--set", "data.tokenizer=bytes", "--set", "training.seq_len=24"];
        float8(&[&["eval", folder, "--data", data], &settings[..], flags].concat()).unwrap()
    }
}

fn weights(model: &Decoder<Flex>) -> BTreeMap<String, Vec<u32>> {
    let bits = |weight| values(weight).into_iter().map(f32::to_bits).collect();
    linears(model).into_iter().map(|(name, weight)| (name, bits(weight))).collect()
}

/// Scales in another dtype. Powers of two, as in rowwise, stay exact.
fn narrowed(dtype: Dtype) -> impl Fn(&mut Files) {
    move |files| {
        files.change_scales(|stored| {
            let values = stored.bytes.as_chunks::<4>().0.iter().map(|bytes| f32::from_le_bytes(*bytes));
            stored.bytes = match dtype {
                Dtype::BF16 => values.flat_map(|value| bf16::from_f32(value).to_le_bytes()).collect(),
                _ => values.flat_map(|value| f16::from_f32(value).to_le_bytes()).collect(),
            };
            stored.dtype = dtype;
        });
    }
}

/// [`LINEAR`] in high precision, with lists of linears that are not quantized.
fn ignores(list: Value) -> impl Fn(&mut Files) {
    move |files| {
        let codes = Files { tensors: files.tensors.clone(), json: files.json.clone() }.weights();
        let values: Vec<f32> = codes[LINEAR].iter().map(|bits| f32::from_bits(*bits)).collect();
        // In files the weight is `[out, in]`.
        let transposed: Vec<f32> = (0..256 * 128).map(|i| values[i % 128 * 256 + i / 128]).collect();
        *files.of("weight") = Stored::f32(&format!("{LINEAR}.weight"), &[256, 128], &transposed);
        files.tensors.remove(&format!("{LINEAR}.weight_scale"));
        files.quantization()["ignore"] = list.clone();
    }
}

/// A configuration in the words of another program, with scales of rows `[out]`.
fn says(config: Value) -> impl Fn(&mut Files) {
    move |files| {
        *files.quantization() = config.clone();
        if config["quant_method"] != "fp8" {
            files.change_scales(|stored| stored.shape.truncate(1));
        }
    }
}

/// Static scales of inputs with these endings.
pub(crate) fn with_inputs(ending: &'static str) -> impl Fn(&mut Files) {
    move |files| {
        let weights: Vec<_> = files.tensors.keys().filter_map(|name| name.strip_suffix("_proj.weight")).collect();
        let names: Vec<_> = weights.into_iter().map(|linear| format!("{linear}_proj.{ending}")).collect();
        names.into_iter().for_each(|name| files.add(name));
    }
}

#[test]
fn every_form_gives_the_same_weights() {
    let all = DYNAMIC.map(|recipe| (recipe, Files::new(recipe)));
    let quark = |scheme: &str| {
        let all = |is_dynamic| json!({"dtype": "fp8_e4m3", "qscheme": scheme, "is_dynamic": is_dynamic});
        let layer = json!({"weight": all(false), "input_tensors": all(true), "output_tensors": all(false)});
        json!({"quant_method": "quark", "global_quant_config": {"weight": all(false), "input_tensors": all(true)},
               "layer_quant_config": {"*k_proj": layer}, "exclude": ["lm_head"]})
    };
    let modelopt = |algorithm: &str, key: &str| json!({"quant_method": "modelopt", "quant_algo": algorithm, "kv_cache_quant_algo": "FP8", key: ["lm_head", "*.router*"]});
    let fp8 = |more: Value| {
        let mut config = json!({"quant_method": "fp8", "ignored_layers": ["lm_head"]});
        config.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        config
    };
    let lists = |list: Value| fp8(json!({"weight_block_size": [128, 128], "ignored_layers": list}));
    let fbgemm = json!({"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0, "modules_to_not_convert": []});
    let blocks = json!({
        "quant_method": "compressed-tensors", "format": "float-quantized", "ignore": ["lm_head"],
        "config_groups": {"group_0": {"targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128]},
            "input_activations": {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 128, "dynamic": true}}},
    });
    let without_size = |list: Value| {
        move |files: &mut Files| *files.quantization() = json!({"quant_method": "fp8", "modules_to_not_convert": list})
    };
    let renamed = |from: &'static str, to: &'static str, config: Value| {
        move |files: &mut Files| {
            files.rename(from, to);
            *files.quantization() = config.clone();
        }
    };
    let both = |one: &'static dyn Fn(&mut Files), config: Value| {
        move |files: &mut Files| {
            one(files);
            says(config.clone())(files);
        }
    };
    let [vllm, transformers]: [&'static dyn Fn(&mut Files); 2] =
        [&|files| with_inputs("input_scale")(files), &|files| with_inputs("activation_scale")(files)];
    let cases: &[(_, Change<'_>)] = &[
        (Rowwise, &narrowed(Dtype::BF16)),
        (Rowwise, &narrowed(Dtype::F16)),
        (Tensorwise, &|files| files.change_scales(|stored| stored.shape = vec![])),
        (Mxfp8, &|files| files.change_scales(|stored| stored.dtype = Dtype::F8_E8M0)),
        (Rowwise, &|files| files.quantization()["quantization_status"] = json!("frozen")),
        // Names of vLLM and of transformers, with and without scales of inputs and a size of blocks.
        (Tensorwise, &says(fp8(json!({})))),
        (Tensorwise, &says(fp8(json!({"activation_scheme": "dynamic", "weight_block_size": null})))),
        (Tensorwise, &renamed("weight_scale", "weight_scale_inv", fp8(json!({})))),
        (Tensorwise, &both(vllm, fp8(json!({"activation_scheme": "static"})))),
        (Tensorwise, &both(transformers, fp8(json!({"activation_scheme": "static", "weight_block_size": null})))),
        (Blockwise, &says(fp8(json!({"fmt": "float8_e4m3fn", "scale_fmt": "ue8m0", "weight_block_size": [128, 128]})))),
        // Blocks are transformers' default. In DeepSeek's files no list names the output layer.
        (Blockwise, &without_size(json!(["lm_head"]))),
        (Blockwise, &without_size(Value::Null)),
        (Blockwise, &renamed("weight_scale_inv", "weight_scale", blocks)),
        (Rowwise, &says(fbgemm)),
        (Rowwise, &says(modelopt("FP8_PER_CHANNEL_PER_TOKEN", "ignore"))),
        (Tensorwise, &both(vllm, modelopt("FP8", "exclude_modules"))),
        (Mxfp8, &|files| *files.quantization() = json!({"quant_method": "modelopt", "quant_algo": "MXFP8"})),
        (Rowwise, &says(quark("per_channel"))),
        (Tensorwise, &says(quark("per_tensor"))),
        // The older key of compressed-tensors.
        (Rowwise, &|files| {
            let json = files.json.as_object_mut().unwrap();
            let config = json.remove("quantization_config").unwrap();
            json.insert("compression_config".into(), config);
        }),
        // Names, and patterns after `re:`. Linears in high precision in the files are read as such.
        (Rowwise, &ignores(json!([LINEAR, "lm_head"]))),
        (Rowwise, &ignores(json!(["re:.*lm_head", "re:model\\.layers\\.0\\.mlp\\.up_proj$"]))),
        (Rowwise, &ignores(json!(["lm_head", "re:.*\\.0\\.(?!self_attn).*up_proj"]))),
        (Rowwise, &ignores(json!([]))),
        (Rowwise, &ignores(Value::Null)),
        // In lists of transformers a part of a name matches up to its end.
        (Blockwise, &says(lists(json!(["lm_head", "model.layers.*.mlp.up"])))),
        (Blockwise, &says(lists(json!(["model.layers.11", "layers.0.mlp.up"])))),
    ];
    for (i, (recipe, change)) in cases.iter().enumerate() {
        let plain = &all.iter().find(|(of, _)| of == recipe).unwrap().1;
        let mut files = plain.clone();
        change(&mut files);
        assert!(files.weights() == plain.weights(), "case {i}: {recipe} {}", files.json);
    }
    // ModelOpt's own file.
    let mut files = all[0].1.clone();
    with_inputs("input_scale")(&mut files);
    files.json.as_object_mut().unwrap().remove("quantization_config");
    let folder = files.folder();
    write_json(
        &folder.path().join("hf_quant_config.json"),
        &json!({"quantization": {"quant_algo": "FP8", "exclude_modules": ["lm_head"]}}),
    );
    assert!(weights(&Decoder::load_hf(folder.path(), &Default::default()).unwrap()) == all[0].1.weights());
}

/// A scale of 0 with zero codes is valid, and block scales may be bytes.
#[test]
fn zeros_and_powers_of_two_are_scales() {
    let mut files = Files::new(Rowwise);
    files.of("weight").bytes[2 * 128..3 * 128].fill(0x80);
    let expected = files.weights();
    files.of("weight_scale").bytes[8..12].copy_from_slice(&0.0_f32.to_le_bytes());
    assert!(files.weights() == expected);
    let [mut numbers, mut bytes] = [(); 2].map(|()| Files::new(Blockwise));
    numbers.change_scales(|stored| stored.bytes = 0.25_f32.to_le_bytes().repeat(stored.bytes.len() / 4));
    bytes.change_scales(|stored| (stored.dtype, stored.bytes) = (Dtype::F8_E8M0, vec![125; stored.bytes.len() / 4]));
    assert!(bytes.weights() == numbers.weights());
}

/// An export keeps codes, scales and settings of inputs, also if nothing here uses them: a
/// scale of dynamically scaled inputs, inputs in high precision, and inputs that our recipes cast
/// otherwise. An evaluation reports the latter. Scales of caches are not written.
#[test]
fn an_export_keeps_what_the_files_say_of_inputs() {
    let of = |strategy: &str| json!({"num_bits": 8, "type": "float", "strategy": strategy, "dynamic": true, "symmetric": true});
    let of_inputs = |inputs: Value| {
        move |files: &mut Files| files.quantization()["config_groups"]["group_0"]["input_activations"] = inputs.clone()
    };
    let input_scale = |files: &mut Files| files.add(format!("{LINEAR}.input_scale"));
    let caches = |files: &mut Files| {
        for own in ["self_attn.k_scale", "self_attn.v_scale", "self_attn.k_proj.k_scale"] {
            files.add(format!("model.layers.0.{own}"));
        }
    };
    let cases: &[(_, Change<'_>, &str)] = &[
        (Tensorwise, &input_scale, ""),
        (Rowwise, &input_scale, ""),
        (Rowwise, &of_inputs(Value::Null), "rowwise weights with inputs in high precision"),
        (Rowwise, &of_inputs(of("tensor")), "rowwise weights with tensorwise inputs"),
        (Tensorwise, &of_inputs(of("token")), "tensorwise weights with rowwise inputs"),
        (Tensorwise, &of_inputs(Value::Null), "tensorwise weights with inputs in high precision"),
        (Mxfp8, &of_inputs(of("token")), "1x32 weights with rowwise inputs"),
        (Rowwise, &caches, "model.layers.0.self_attn.k_proj.k_scale and 2 more of its kind are not used"),
    ];
    for (recipe, change, said) in cases {
        let mut files = Files::new(*recipe);
        change(&mut files);
        let (out, folder) = files.export(&[]).unwrap();
        assert!(out.contains(said) && out.contains("14 keep their codes") && !out.contains("static"), "{out}");
        let again = TensorFiles::open_folder(folder.path()).unwrap();
        for (name, stored) in &files.tensors {
            let is_written = !name.contains("k_scale") && !name.contains("v_scale");
            let found = again.get(name).map(|found| (found.dtype(), found.bytes().unwrap()));
            assert!(found == is_written.then(|| (stored.dtype, stored.bytes.clone())), "{recipe}: {name}");
        }
        assert!(again.names().all(|name| files.tensors.contains_key(name)), "{recipe}");
        let json = json_file(&folder.path().join("config.json"));
        assert_eq!(json["quantization_config"], files.json["quantization_config"], "{recipe}");
        let out = files.eval(&[]);
        assert!(out.contains(said), "{out}");
        assert_eq!(out.contains("; here inputs are cast by"), said.contains("weights with"), "{out}");
    }
}

/// The most specific matching group counts. A folder with linears in several formats runs
/// unchanged, and is exported only in one format.
#[test]
fn groups_name_their_linears() {
    let (mut files, rowwise) = (Files::new(Tensorwise), Files::new(Rowwise));
    let mut expected = files.weights();
    expected.insert(LINEAR.into(), rowwise.weights()[LINEAR].clone());
    files.take(&rowwise);
    let mut channel = rowwise.json["quantization_config"]["config_groups"]["group_0"].clone();
    for target in ["re:.*layers\\.0\\.mlp\\.up_proj", LINEAR] {
        channel["targets"] = json!([target]);
        files.quantization()["config_groups"]["group_1"] = channel.clone();
        assert!(files.weights() == expected, "{target}");
    }
    let out = files.eval(&[]);
    let is_kept = out.contains("FP8-only weights: 14 of") && !out.contains("cast anew");
    assert!(out.contains("precision: fp8") && is_kept, "{out}");
    let out = files.eval(&["--set", "float8.recipe=rowwise"]);
    let note = "has FP8 weights in several formats, 13 of which, the first layers.0.self_attn.q_proj, are decoded and cast anew by rowwise\n";
    assert!(out.contains(note), "{out}");
    let (out, _) = files.export(&["--recipe", "rowwise"]).unwrap();
    assert!(out.contains("rowwise weights; 14 are decoded and cast anew"), "{out}");
    let error = chain(files.export(&[]).map(drop).unwrap_err());
    assert!(error.contains("mlp.up_proj as rowwise weights: a folder has one format"), "{error}");
    // Nor may inputs differ.
    let mut files = rowwise.clone();
    channel["input_activations"] = Value::Null;
    files.quantization()["config_groups"]["group_1"] = channel;
    let error = chain(files.export(&[]).map(drop).unwrap_err());
    assert!(error.contains("rowwise weights with inputs in high precision: a folder has one format"), "{error}");
}
