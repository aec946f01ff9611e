//! FP8 checkpoints of other programs: every form of scales, names and lists, and what an export
//! keeps of it.

use crate::common::*;
use crate::float8_exports::{DYNAMIC, export, json_file, linears, square};

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
        Ok((exported(from.path(), to.path(), &[&["--format", "fp8"], flags].concat())?, to))
    }

    /// Log of an evaluation.
    fn eval(&self, flags: &[&str]) -> String {
        let (folder, data) = (self.folder(), text());
        let [folder, data] = [folder.path(), data.path()].map(|path| path.to_str().unwrap());
        let settings = ["--set", "data.tokenizer=bytes", "--set", "training.seq_len=24"];
        float8(&[&["eval", folder, "--data", data], &settings[..], flags].concat()).unwrap()
    }
}

/// Change of a checkpoint; of [`LINEAR`], where nothing else is said.
#[derive(Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Edit {
    /// The configuration.
    Quantization(Value),
    /// A key of the configuration, with dots between tables.
    At(String, Value),
    /// The configuration under the older key of compressed-tensors.
    OlderKey,
    /// A scale of this name.
    Add(String),
    /// Scales of the inputs of all linears, with this name.
    Inputs(String),
    /// Endings of the names of all scales.
    Rename(String, String),
    /// Scales in another dtype. Powers of two, as in rowwise, stay exact.
    Scales(Dtype),
    /// Scales with this many dimensions at most.
    ScaleDims(usize),
    /// The weight in high precision.
    Decoded,
    Without(String),
    /// Bytes of a tensor, starting at a place.
    Bytes(String, usize, Vec<u8>),
    /// A tensor of another dtype and shape, with this byte everywhere.
    Tensor(String, Dtype, Vec<usize>, u8),
}

impl Edit {
    pub(crate) fn apply(&self, files: &mut Files) {
        match self {
            Self::Quantization(value) => *files.quantization() = value.clone(),
            Self::At(keys, value) => {
                *keys.split('.').fold(files.quantization(), |json, key| &mut json[key]) = value.clone();
            }
            Self::OlderKey => {
                let config = files.quantization().take();
                files.json["compression_config"] = config;
                files.json.as_object_mut().unwrap().remove("quantization_config");
            }
            Self::Add(name) => drop(files.tensors.insert(name.clone(), Stored::f32(name, &[], &[0.5]))),
            Self::Inputs(ending) => {
                let names: Vec<_> = files.tensors.keys().filter_map(|name| name.strip_suffix("_proj.weight")).collect();
                let names: Vec<_> = names.into_iter().map(|linear| format!("{linear}_proj.{ending}")).collect();
                names.into_iter().for_each(|name| Self::Add(name).apply(files));
            }
            Self::Rename(from, to) => {
                let renamed = |(name, stored): (String, Stored)| {
                    let name = name.strip_suffix(&**from).map_or(name.clone(), |begin| format!("{begin}{to}"));
                    (name.clone(), Stored { name, ..stored })
                };
                files.tensors = std::mem::take(&mut files.tensors).into_iter().map(renamed).collect();
            }
            Self::Scales(dtype) => files.change_scales(|stored| {
                let values = stored.bytes.as_chunks::<4>().0.iter().map(|bytes| f32::from_le_bytes(*bytes));
                stored.bytes = match dtype {
                    Dtype::BF16 => values.flat_map(|value| bf16::from_f32(value).to_le_bytes()).collect(),
                    Dtype::F16 => values.flat_map(|value| f16::from_f32(value).to_le_bytes()).collect(),
                    _ => stored.bytes.clone(),
                };
                stored.dtype = *dtype;
            }),
            Self::ScaleDims(dims) => files.change_scales(|stored| stored.shape.truncate(*dims)),
            Self::Decoded => {
                let values: Vec<f32> = files.weights()[LINEAR].iter().map(|bits| f32::from_bits(*bits)).collect();
                // In files the weight is `[out, in]`.
                let transposed: Vec<f32> = (0..256 * 128).map(|i| values[i % 128 * 256 + i / 128]).collect();
                *files.of("weight") = Stored::f32(&format!("{LINEAR}.weight"), &[256, 128], &transposed);
                files.tensors.remove(&format!("{LINEAR}.weight_scale"));
            }
            Self::Without(own) => drop(files.tensors.remove(&format!("{LINEAR}.{own}"))),
            Self::Bytes(own, from, bytes) => files.of(own).bytes[*from..][..bytes.len()].copy_from_slice(bytes),
            Self::Tensor(own, dtype, shape, byte) => {
                let bytes = vec![*byte; shape.iter().product::<usize>() * dtype.bitsize() / 8];
                *files.of(own) = Stored { dtype: *dtype, shape: shape.clone(), bytes, ..files.of(own).clone() };
            }
        }
    }
}

/// Checkpoints of the square model, by recipe.
pub(crate) struct Recipes([(Recipe, Files); 4]);

impl Recipes {
    pub(crate) fn new() -> Self {
        Self(DYNAMIC.map(|recipe| (recipe, Files::new(recipe))))
    }

    pub(crate) fn of(&self, recipe: Recipe) -> &Files {
        &self.0.iter().find(|(of, _)| *of == recipe).unwrap().1
    }

    /// A checkpoint with changes.
    pub(crate) fn edited(&self, recipe: Recipe, edits: &[Edit]) -> Files {
        let mut files = self.of(recipe).clone();
        edits.iter().for_each(|edit| edit.apply(&mut files));
        files
    }
}

fn weights(model: &Decoder<Flex>) -> BTreeMap<String, Vec<u32>> {
    let bits = |weight| values(weight).into_iter().map(f32::to_bits).collect();
    linears(model).into_iter().map(|(name, weight)| (name, bits(weight))).collect()
}

/// Scales in every dtype and shape, names and lists of vLLM, transformers, fbgemm and ModelOpt,
/// linears in high precision by names and patterns.
#[test]
fn every_form_gives_the_same_weights() {
    let all = Recipes::new();
    for (recipe, edits) in table::<(Recipe, Vec<Edit>)>("vectors/float8_forms") {
        let files = all.edited(recipe, &edits);
        assert!(files.weights() == all.of(recipe).weights(), "{recipe} {}", files.json);
    }
    // ModelOpt's own file.
    let mut files = all.edited(Tensorwise, &[Edit::Inputs("input_scale".into())]);
    files.json.as_object_mut().unwrap().remove("quantization_config");
    let folder = files.folder();
    write_json(
        &folder.path().join("hf_quant_config.json"),
        &json!({"quantization": {"quant_algo": "FP8", "exclude_modules": ["lm_head"]}}),
    );
    assert!(weights(&Decoder::load_hf(folder.path(), &Default::default()).unwrap()) == all.of(Tensorwise).weights());
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
    let all = Recipes::new();
    for (recipe, edits, said) in table::<(Recipe, Vec<Edit>, String)>("vectors/float8_inputs") {
        let files = all.edited(recipe, &edits);
        let (out, folder) = files.export(&[]).unwrap();
        assert!(out.contains(&said) && out.contains("14 keep their codes") && !out.contains("static"), "{out}");
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
        assert!(out.contains(&said), "{out}");
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
    let is_kept = out.contains("FP8-only weights: 14 of") && !out.contains("requantized");
    assert!(out.contains("precision: fp8") && is_kept, "{out}");
    let out = files.eval(&["--set", "float8.recipe=rowwise"]);
    let note = "has FP8 weights in several formats, 13 of which, the first layers.0.self_attn.q_proj, are decoded and requantized by rowwise\n";
    assert!(out.contains(note), "{out}");
    let (out, _) = files.export(&["--recipe", "rowwise"]).unwrap();
    assert!(out.contains("rowwise weights; 14 are decoded and requantized"), "{out}");
    let error = chain(files.export(&[]).map(drop).unwrap_err());
    assert!(error.contains("mlp.up_proj as rowwise weights: a folder has one format"), "{error}");
    // Nor may inputs differ.
    let mut files = rowwise.clone();
    channel["input_activations"] = Value::Null;
    files.quantization()["config_groups"]["group_1"] = channel;
    let error = chain(files.export(&[]).map(drop).unwrap_err());
    assert!(error.contains("rowwise weights with inputs in high precision: a folder has one format"), "{error}");
}
