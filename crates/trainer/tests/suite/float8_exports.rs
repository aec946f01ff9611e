//! Export in FP8: codes and scales equal the casts of training, and `quantization_config`.

use crate::common::*;

/// Model that every format accepts: blocks of 128 by 128 have no edges.
pub(crate) fn square(tied: bool) -> DecoderConfig {
    tiny_with(|dims| {
        (dims.hidden_size, dims.intermediate_size) = (128, 256);
        (dims.num_heads, dims.num_kv_heads, dims.head_dim) = (8, 4, 32);
        dims.tie_word_embeddings = tied;
    })
}

/// Recipes whose casts need no history.
pub(crate) const DYNAMIC: [Recipe; 4] = [Recipe::Tensorwise, Recipe::Rowwise, Recipe::Blockwise, Recipe::Mxfp8];

/// This recipe for all linears except the output layer.
pub(crate) fn config(recipe: Recipe, model: &DecoderConfig) -> Float8Config {
    let kept: &[&str] = if model.dims.tie_word_embeddings { &[] } else { &["lm_head"] };
    Float8Config::new(recipe).with_filter_fqns(kept.iter().copied())
}

pub(crate) fn options() -> ExportOptions {
    ExportOptions { dtype: ExportDtype::Bf16, ..ExportOptions::default() }
}

/// Writes a model in FP8.
pub(crate) fn export(model: &Decoder<Flex>, recipe: Recipe, folder: &Path) -> Result<(), Error> {
    let config = config(recipe, model.config());
    model.save_hf_float8(folder, &options(), &Float8Export::new(&config))
}

pub(crate) fn json_file(path: &Path) -> Value {
    serde_json::from_slice(&fs::read(path).unwrap()).unwrap()
}

/// Names and contents of all files in a folder.
pub(crate) fn contents(folder: &Path) -> BTreeMap<String, Vec<u8>> {
    let file = |entry: fs::DirEntry| (entry.file_name().into_string().unwrap(), fs::read(entry.path()).unwrap());
    fs::read_dir(folder).unwrap().map(|entry| file(entry.unwrap())).collect()
}

/// Names and weights, `[in, out]`, of the linears that are written in FP8.
pub(crate) fn linears(model: &Decoder<Flex>) -> Vec<(String, Tensor<Flex, 2>)> {
    let mut linears = vec![];
    visit_params::<Flex, _>(model, |param| {
        if let Some(name) = param.name().strip_suffix("_proj.weight") {
            let weight = Tensor::from_primitive(TensorPrimitive::Float(param.float().unwrap()));
            linears.push((format!("model.{name}_proj"), weight));
        }
    });
    linears
}

/// Linears that vLLM fuses with this one, including itself.
pub(crate) fn fused(linear: &str) -> &'static [&'static str] {
    let (_, name) = linear.rsplit_once('.').unwrap();
    [&["q_proj", "k_proj", "v_proj"][..], &["gate_proj", "up_proj"], &["o_proj"], &["down_proj"]]
        .into_iter()
        .find(|names| names.contains(&name))
        .unwrap()
}

#[test]
fn quantization_configs_are_those_of_compressed_tensors_and_deepseek() {
    let dir = tempfile::tempdir().unwrap();
    for (recipe, expected) in table::<(Recipe, Value)>("vectors/quantization_configs") {
        for tied in [false, true] {
            let model = model::<Flex>(square(tied), 1);
            let mut config = config(recipe, model.config());
            config.filter_fqns.push("layers.0.self_attn.o_proj".into());
            let folder = dir.path().join(format!("{recipe}-{tied}"));
            model.save_hf_float8(&folder, &options(), &Float8Export::new(&config)).unwrap();
            let json = json_file(&folder.join("config.json"));
            assert_eq!(json["quantization_config"], expected, "{recipe}, tied: {tied}");
            assert_eq!(json["dtype"], "bfloat16");
            let files = TensorFiles::open_folder(&folder).unwrap();
            assert_eq!(files.get("model.layers.0.self_attn.o_proj.weight").unwrap().dtype(), Dtype::BF16);
            assert_eq!(files.get("lm_head.weight").is_none(), tied);
        }
    }
    // A layer that fell back in training is in high precision.
    let model = model::<Flex>(square(true), 2);
    let state = serde_json::from_value(json!({
        "step": 3, "has_begun": false,
        "layers": {"layers.1.mlp.down_proj": {"fallback": {"step": 2, "to": "high_precision", "reason": "sqnr"}}},
    }));
    let (config, state, folder) =
        (config(Recipe::Rowwise, model.config()), state.unwrap(), dir.path().join("fallback"));
    model.save_hf_float8(&folder, &options(), &Float8Export::new(&config).with_state(&state)).unwrap();
    let json = json_file(&folder.join("config.json"));
    assert_eq!(json["quantization_config"]["ignore"], json!(["model.layers.1.mlp.down_proj", "lm_head"]));
}

/// Another recipe requantizes the decoded values. An export in high precision has no FP8 keys.
#[test]
fn a_folder_in_fp8_is_exported_in_other_formats() {
    let dir = tempfile::tempdir().unwrap();
    let [first, plain, rowwise] = ["first", "plain", "rowwise"].map(|name| dir.path().join(name));
    export(&model::<Flex>(square(true), 2), Recipe::Blockwise, &first).unwrap();
    exported(&first, &plain, &["--format", "f32"]).unwrap();
    let out = exported(&first, &rowwise, &["--format", "fp8", "--recipe", "rowwise"]).unwrap();
    assert!(out.contains("14 of 14 linears, rowwise weights") && !out.contains("keep"), "{out}");
    let [decoded, exported] = [&first, &plain].map(|folder| Decoder::<Flex>::load_hf(folder, &Default::default()));
    for ((name, one), (_, other)) in linears(&decoded.unwrap()).into_iter().zip(linears(&exported.unwrap())) {
        assert_eq!(values(one), values(other), "{name}");
    }
    for (folder, method) in [(&plain, Value::Null), (&rowwise, json!("compressed-tensors"))] {
        let json = json_file(&folder.join("config.json"));
        assert_eq!(json["quantization_config"]["quant_method"], method, "{}", folder.display());
    }
}
