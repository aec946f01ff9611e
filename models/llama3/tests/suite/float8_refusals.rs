//! FP8 exports that readers would not accept are refused. The error names the layer and an
//! alternative, and no files are left.

use std::fs;

use burn::backend::Flex;
use burn::tensor::Tensor;
use burn_float8::config::{CastConfig, Format, Granularity, Operand};
use burn_float8::{Float8Config, Float8LinearConfig, Recipe};
use llama3::{CausalLmExt, Dimensions, Error, LlamaConfig};
use train::hf::{Float8Export, Float8FilesError};

use crate::common::{cause, model, tiny};
use crate::float8_exports::{config, llama3, options, square};

/// Error of an export with this configuration. Checks that no folder is left.
fn refused(dims: LlamaConfig, config: &Float8Config) -> Error {
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path().join("out");
    let error = model::<Flex>(dims, 1).save_hf_float8(&folder, &options(), &Float8Export::new(config)).unwrap_err();
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0, "{error}");
    error
}

fn float8_error(dims: LlamaConfig, config: &Float8Config) -> Float8FilesError {
    cause(Err::<(), _>(refused(dims, config)))
}

#[test]
fn sizes_that_readers_cannot_take() {
    let with = |change: fn(&mut Dimensions)| {
        let mut config = square(true);
        change(&mut config.dims);
        config
    };
    let narrow = with(|dims| dims.num_kv_heads = 2);
    let short = with(|dims| dims.intermediate_size = 320);
    let odd = with(|dims| dims.intermediate_size = 272);
    for (recipe, dims, layer, axis, size, multiple) in [
        (Recipe::Blockwise, narrow.clone(), "layers.0.self_attn.k_proj", "out", 64, 128),
        (Recipe::Blockwise, short.clone(), "layers.0.mlp.gate_proj", "out", 320, 128),
        (Recipe::Mxfp8, odd.clone(), "layers.0.mlp.down_proj", "in", 272, 32),
        (Recipe::Mxfp8WgradWithHp, odd.clone(), "layers.0.mlp.down_proj", "in", 272, 32),
    ] {
        let error = float8_error(dims, &Float8Config::new(recipe));
        let text = error.to_string();
        assert!(text.starts_with(layer) && text.contains("rowwise") && text.contains("filter_fqns"), "{text}");
        let Float8FilesError::Ragged { axis: a, size: s, multiple: m, .. } = error else { panic!("{text}") };
        assert_eq!((a, s, m), (axis, size, multiple));
    }
    // The alternatives in the message are accepted.
    let dir = tempfile::tempdir().unwrap();
    for (name, dims, config) in [
        ("rowwise", tiny(), config(Recipe::Rowwise, &tiny())),
        ("tensorwise", tiny(), config(Recipe::Tensorwise, &tiny())),
        ("mx", short.clone(), config(Recipe::Mxfp8, &short)),
        ("filtered", odd.clone(), config(Recipe::Mxfp8, &odd).with_filter_fqns(["down_proj"])),
        (
            "unfused",
            narrow.clone(),
            config(Recipe::Blockwise, &narrow).with_filter_fqns(["q_proj", "k_proj", "v_proj"]),
        ),
    ] {
        let folder = dir.path().join(name);
        let export = Float8Export::new(&config);
        model::<Flex>(dims, 1)
            .save_hf_float8(&folder, &options(), &export)
            .unwrap_or_else(|error| panic!("{name}: {error}"));
    }
}

#[test]
fn linears_that_vllm_runs_as_one_are_in_one_format() {
    let filtered = config(Recipe::Rowwise, &square(true)).with_filter_fqns(["layers.1.self_attn.k_proj"]);
    let error = float8_error(square(true), &filtered);
    let Float8FilesError::Fused { layer, other } = &error else { panic!("{error}") };
    assert_eq!((layer.as_str(), other.as_str()), ("layers.1.self_attn.q_proj", "layers.1.self_attn.k_proj"));

    let other = config(Recipe::Rowwise, &square(true))
        .with_override(["*.down_proj"], Float8LinearConfig::new(Recipe::Tensorwise));
    let error = float8_error(square(true), &other);
    let Float8FilesError::Mixed { layer, other, .. } = &error else { panic!("{error}") };
    assert_eq!((layer.as_str(), other.as_str()), ("layers.0.self_attn.q_proj", "layers.0.mlp.down_proj"));
    // Recipes with the same weight casts can be combined.
    let alike = config(Recipe::Rowwise, &square(true))
        .with_override(["*.down_proj"], Float8LinearConfig::new(Recipe::RowwiseWithGwHp));
    let dir = tempfile::tempdir().unwrap();
    model::<Flex>(square(true), 1)
        .save_hf_float8(dir.path().join("out"), &options(), &Float8Export::new(&alike))
        .unwrap();
}

#[test]
fn casts_that_no_format_has() {
    let rowwise = Recipe::Rowwise.casts();
    let weight = |cast| rowwise.with(Operand::WEIGHT_T, cast).with(Operand::WEIGHT, cast);
    for (casts, says) in [
        (weight(CastConfig::dynamic(Granularity::Row, Format::E5m2)), "weights in e5m2"),
        (weight(CastConfig::dynamic(Granularity::Block1x128, Format::E4m3)), "1x128 weights"),
        (weight(CastConfig::dynamic(Granularity::Tensor, Format::E4m3)), "tensorwise weights with rowwise inputs"),
        (rowwise.with(Operand::INPUT, CastConfig::dynamic(Granularity::Row, Format::E5m2)), "inputs in e5m2"),
    ] {
        let casts = casts.with(Operand::INPUT_T, casts[Operand::INPUT]);
        let config = Float8Config::from(Float8LinearConfig::new(Recipe::Rowwise).with_casts(casts));
        let error = float8_error(square(true), &config);
        assert!(matches!(&error, Float8FilesError::NoFormat { .. }) && error.to_string().contains(says), "{error}");
    }
    // If fprop is in high precision, the weight is exported in high precision.
    let off = CastConfig::disabled();
    let casts = rowwise.with(Operand::INPUT, off).with(Operand::WEIGHT_T, off);
    let config = Float8Config::from(Float8LinearConfig::new(Recipe::Rowwise).with_casts(casts));
    assert!(matches!(float8_error(square(true), &config), Float8FilesError::Nothing));
}

#[test]
fn output_layers_histories_and_values() {
    let error = float8_error(square(false), &Float8Config::new(Recipe::Rowwise));
    assert!(matches!(&error, Float8FilesError::OutputLayer { layer } if layer == "lm_head"), "{error}");

    let delayed = config(Recipe::Delayed, &square(true));
    let error = float8_error(square(true), &delayed);
    let text = error.to_string();
    assert!(matches!(&error, Float8FilesError::NoHistory { .. }) && text.contains("tensorwise"), "{text}");

    let error = refused(square(true), &config(Recipe::Rowwise, &square(true)).with_filter_fqns(["nothing"]));
    assert!(error.is::<burn_float8::Float8Error>(), "{error}");

    let recipes = [Recipe::Tensorwise, Recipe::Rowwise, Recipe::Blockwise, Recipe::Mxfp8];
    for value in [f32::NAN, f32::INFINITY] {
        for recipe in recipes {
            let mut broken = model::<Flex>(square(true), 1);
            let up_proj = &mut broken.layers[1].mlp.as_mut().unwrap().up_proj;
            up_proj.weight = up_proj.weight.clone().map(|weight: Tensor<Flex, 2>| {
                let [rows, cols] = weight.dims();
                let at = Tensor::full([1, 1], value, &weight.device());
                weight.slice_assign([rows - 1..rows, cols - 1..cols], at)
            });
            let dir = tempfile::tempdir().unwrap();
            let config = config(recipe, &square(true));
            let folder = dir.path().join("out");
            let error = cause(broken.save_hf_float8(&folder, &options(), &Float8Export::new(&config)));
            let Float8FilesError::NotFinite { name, index, value: found } = &error else {
                panic!("{recipe} {value}: {error}")
            };
            let last = broken.layers[1].mlp.as_ref().unwrap().up_proj.weight.dims().into_iter().product::<usize>() - 1;
            assert_eq!((name.as_str(), *index), ("model.layers.1.mlp.up_proj.weight", last), "{recipe} {value}");
            assert_eq!(found.to_string(), value.to_string());
            assert!(!folder.exists());
        }
    }
}

/// A recipe without a format is refused before anything is read.
#[test]
fn flags_that_contradict_each_other() {
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path().join("hf");
    model::<Flex>(square(true), 1).save_hf(&folder, &options()).unwrap();
    let (folder, out) = (folder.to_str().unwrap(), dir.path().join("out"));
    let out = out.to_str().unwrap();
    let error = llama3(&["export", folder, out, "--recipe", "rowwise"]).unwrap_err().to_string();
    assert!(error.contains("--recipe rowwise") && error.contains("--format fp8"), "{error}");
    let error = llama3(&["export", folder, out, "--format", "fp8", "--recipe", "delayed"]).unwrap_err();
    assert!(matches!(error.downcast_ref(), Some(Float8FilesError::NoHistory { .. })), "{error}");
    assert!(!fs::exists(out).unwrap());
    let said = llama3(&["export", folder, out, "--format", "fp8"]).unwrap();
    assert!(said.contains("tensorwise weights"), "{said}");
}
