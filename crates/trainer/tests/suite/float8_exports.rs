//! Export in FP8: codes and scales equal the casts of training, and `quantization_config`.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use anyhow::Error;
use burn::backend::Flex;
use burn::tensor::Tensor;
use burn::tensor::ops::FloatTensor;
use burn_float8::backend::{Cast, Float8Backend, GivenAmax, HostCodes, Orientation};
use burn_float8::config::Operand;
use burn_float8::{Float8Config, Recipe};
use models::{CausalLmExt, Decoder, DecoderConfig};
use safetensors::Dtype;
use serde_json::{Value, json};
use trainer::TensorFiles;
use trainer::hf::{ExportDtype, ExportOptions, Float8Export};

use crate::common::{float8, model, tiny_with, values};

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
    for (i, layer) in model.layers.iter().enumerate() {
        let (attention, mlp) = (&layer.self_attn, layer.mlp.as_ref().unwrap());
        let mut add = |name, linear: &burn::nn::Linear<Flex>| {
            linears.push((format!("model.layers.{i}.{name}"), linear.weight.val()));
        };
        add("self_attn.q_proj", &attention.q_proj);
        add("self_attn.k_proj", &attention.k_proj);
        add("self_attn.v_proj", &attention.v_proj);
        add("self_attn.o_proj", &attention.o_proj);
        add("mlp.gate_proj", &mlp.gate_proj);
        add("mlp.up_proj", &mlp.up_proj);
        add("mlp.down_proj", &mlp.down_proj);
    }
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

/// Weight operand of fprop: the cast of the weight `[in, out]` in training.
fn operand(weight: &Tensor<Flex, 2>, cast: Cast, amax: Option<f32>) -> HostCodes {
    let given = amax.map(|amax| {
        let amax = primitive(Tensor::<Flex, 1>::from_floats([amax], &Default::default()));
        GivenAmax { amax, observe: false }
    });
    let quantized = Flex::fp8_quantize(primitive(weight.clone()), cast, Orientation::Cols, given);
    Flex::fp8_read(&quantized.cols.unwrap())
}

fn primitive<const D: usize>(tensor: Tensor<Flex, D>) -> FloatTensor<Flex> {
    tensor.into_primitive().tensor()
}

/// Codes and scales equal the casts of training, also if fused linears share the largest scale.
#[test]
fn codes_and_scales_are_those_of_the_cast_for_fprop() {
    let dir = tempfile::tempdir().unwrap();
    let model = model::<Flex>(square(false), 4);
    for (recipe, squares) in DYNAMIC.map(|recipe| (recipe, false)).into_iter().chain([(Recipe::Mxfp8, true)]) {
        let folder = dir.path().join(format!("{recipe} {squares}"));
        let mut config = config(recipe, model.config());
        config.linear = config.linear.with_mx_square_weights(squares);
        model.save_hf_float8(&folder, &options(), &Float8Export::new(&config)).unwrap();
        let files = TensorFiles::open_folder(&folder).unwrap();
        let cast = config.linear.kernel_cast(Operand::WEIGHT_T);
        let all = linears(&model);
        for (name, weight) in &all {
            let parent = name.rsplit_once('.').unwrap().0;
            let of = |name: &&str| &all.iter().find(|(other, _)| *other == format!("{parent}.{name}")).unwrap().1;
            let amaxes = fused(name).iter().map(of).map(|weight| weight.clone().abs().max().into_scalar());
            let amax = amaxes.reduce(f32::max).filter(|_| recipe == Recipe::Tensorwise);
            let HostCodes { codes, inv_scales, .. } = operand(weight, cast, amax);
            assert!(files.get(&format!("{name}.weight")).unwrap().bytes().unwrap() == codes, "{recipe} {name}");
            let scale = if recipe == Recipe::Blockwise { "weight_scale_inv" } else { "weight_scale" };
            let scales = files.get(&format!("{name}.{scale}")).unwrap().bytes().unwrap();
            let expected: Vec<u8> = match recipe {
                Recipe::Mxfp8 => inv_scales.iter().map(|scale| scale.to_e8m0().unwrap()).collect(),
                _ => inv_scales.iter().flat_map(|scale| scale.get().to_le_bytes()).collect(),
            };
            assert!(scales == expected, "{recipe} {name}");
        }
        assert_eq!(files.names().count(), 4 + 3 + 2 * all.len(), "{recipe}: norms of two layers, three others, scales");
    }
}

#[test]
fn quantization_configs_are_those_of_compressed_tensors_and_deepseek() {
    let dir = tempfile::tempdir().unwrap();
    let ignored = json!(["model.layers.0.self_attn.o_proj", "lm_head"]);
    let args = |dynamic: bool, more: Value| {
        let mut args = json!({"num_bits": 8, "type": "float", "symmetric": true, "dynamic": dynamic});
        args.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        args
    };
    let compressed_tensors = |format: &str, weights: Value, inputs: Value| {
        json!({
            "quant_method": "compressed-tensors", "format": format, "quantization_status": "compressed",
            "kv_cache_scheme": null, "ignore": ignored,
            "config_groups": {"group_0": {"targets": ["Linear"], "output_activations": null,
                "weights": args(false, weights), "input_activations": args(true, inputs)}},
        })
    };
    let float = |weights: &str, inputs: &str| {
        compressed_tensors("float-quantized", json!({"strategy": weights}), json!({"strategy": inputs}))
    };
    let group = || json!({"strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"});
    let blocks = json!({"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
                        "weight_block_size": [128, 128], "modules_to_not_convert": ignored});
    for (recipe, expected) in [
        (Recipe::Tensorwise, float("tensor", "tensor")),
        (Recipe::Rowwise, float("channel", "token")),
        (Recipe::RowwiseWithGwHp, float("channel", "token")),
        (Recipe::Blockwise, blocks),
        (Recipe::Mxfp8, compressed_tensors("mxfp8-quantized", group(), group())),
    ] {
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
    let path = |name: &str| dir.path().join(name).to_str().unwrap().to_string();
    let (first, plain, rowwise) = (path("first"), path("plain"), path("rowwise"));
    export(&model::<Flex>(square(true), 2), Recipe::Blockwise, first.as_ref()).unwrap();
    float8(&["export", &first, "--output", &plain, "--format", "f32"]).unwrap();
    let out = float8(&["export", &first, "--output", &rowwise, "--format", "fp8", "--recipe", "rowwise"]).unwrap();
    assert!(out.contains("14 of 14 linears, rowwise weights") && !out.contains("keep"), "{out}");
    let [decoded, exported] = [&first, &plain].map(|folder| Decoder::<Flex>::load_hf(folder, &Default::default()));
    for ((name, one), (_, other)) in linears(&decoded.unwrap()).into_iter().zip(linears(&exported.unwrap())) {
        assert_eq!(values(one), values(other), "{name}");
    }
    for (folder, method) in [(&plain, Value::Null), (&rowwise, json!("compressed-tensors"))] {
        let json = json_file(&Path::new(folder).join("config.json"));
        assert_eq!(json["quantization_config"]["quant_method"], method, "{folder}");
    }
}
