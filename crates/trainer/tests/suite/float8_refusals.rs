//! FP8 exports that readers would not accept are refused. The error names the layer and an
//! alternative, and no files are left.

use std::fs;

use burn::backend::Flex;
use burn::tensor::Tensor;
use burn_float8::config::{CastConfig, Format, Granularity, Operand};
use burn_float8::{Float8Config, Float8LinearConfig, Recipe};
use models::{CausalLmExt, Decoder, DecoderConfig, Dimensions};
use trainer::hf::Float8Export;

use crate::common::{chain, float8, model, tiny};
use crate::float8_exports::{DYNAMIC, config, options, square};

/// Error of an export. Checks that no folder is left.
fn refused(model: &Decoder<Flex>, config: &Float8Config) -> String {
    let dir = tempfile::tempdir().unwrap();
    let error = model.save_hf_float8(dir.path().join("out"), &options(), &Float8Export::new(config));
    let error = chain(error.expect_err("it was to be refused"));
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0, "{error}");
    error
}

/// Square model with other dimensions.
fn with(change: fn(&mut Dimensions)) -> DecoderConfig {
    let mut config = square(true);
    change(&mut config.dims);
    config
}

#[test]
fn what_readers_cannot_take_is_refused_with_another_choice() {
    let (tied, narrow) = (square(true), with(|dims| dims.num_kv_heads = 2));
    let (short, odd) = (with(|dims| dims.intermediate_size = 320), with(|dims| dims.intermediate_size = 272));
    let rowwise = config(Recipe::Rowwise, &tied);
    let override_with = |recipe| rowwise.clone().with_override(["*.down_proj"], Float8LinearConfig::new(recipe));
    let casts = |weight: CastConfig, input: CastConfig| {
        let casts = Recipe::Rowwise.casts().with(Operand::WEIGHT_T, weight).with(Operand::WEIGHT, weight);
        let casts = casts.with(Operand::INPUT, input).with(Operand::INPUT_T, input);
        Float8Config::from(Float8LinearConfig::new(Recipe::Rowwise).with_casts(casts))
    };
    let cast = CastConfig::dynamic;
    let (row, e5m2) = (cast(Granularity::Row, Format::E4m3), cast(Granularity::Row, Format::E5m2));
    let off = CastConfig::disabled();
    let no_fprop = Recipe::Rowwise.casts().with(Operand::INPUT, off).with(Operand::WEIGHT_T, off);
    let no_fprop = Float8Config::from(Float8LinearConfig::new(Recipe::Rowwise).with_casts(no_fprop));
    for (dims, config, begins, advises) in [
        (
            &narrow,
            Float8Config::new(Recipe::Blockwise),
            "layers.0.self_attn.k_proj: out = 64 is no multiple of 128",
            "rowwise",
        ),
        (
            &short,
            Float8Config::new(Recipe::Blockwise),
            "layers.0.mlp.gate_proj: out = 320 is no multiple of 128",
            "filter_fqns",
        ),
        (&odd, Float8Config::new(Recipe::Mxfp8), "layers.0.mlp.down_proj: in = 272 is no multiple of 32", "rowwise"),
        (
            &odd,
            Float8Config::new(Recipe::Mxfp8WgradWithHp),
            "layers.0.mlp.down_proj: in = 272 is no multiple",
            "rowwise",
        ),
        (
            &tied,
            rowwise.clone().with_filter_fqns(["layers.1.self_attn.k_proj"]),
            "layers.1.self_attn.q_proj is in FP8 and layers.1.self_attn.k_proj in high precision",
            "quantize both",
        ),
        (
            &tied,
            override_with(Recipe::Tensorwise),
            "layers.0.self_attn.q_proj is written as rowwise weights, and layers.0.mlp.down_proj as tensorwise weights",
            "--recipe",
        ),
        (&tied, casts(e5m2, row), "layers.0.self_attn.q_proj: no format of files has weights in e5m2", "rowwise"),
        (&tied, casts(row, e5m2), "layers.0.self_attn.q_proj: no format of files has inputs in e5m2", "rowwise"),
        (
            &tied,
            casts(cast(Granularity::Block1x128, Format::E4m3), row),
            "layers.0.self_attn.q_proj: no format of",
            "1x128 weights",
        ),
        (
            &tied,
            casts(cast(Granularity::Tensor, Format::E4m3), row),
            "layers.0.self_attn.q_proj: no format of files has tensorwise weights with rowwise inputs",
            "rowwise",
        ),
        (&tied, no_fprop, "no linear of the model is to be in FP8", "filter_fqns"),
        (
            &square(false),
            Float8Config::new(Recipe::Rowwise),
            "lm_head: vLLM reads output layers in high precision",
            "filter_fqns",
        ),
        (
            &tied,
            Float8Config::new(Recipe::Delayed),
            "layers.0.self_attn.q_proj: there is no amax history",
            "tensorwise",
        ),
        (&tied, rowwise.clone().with_filter_fqns(["nothing"]), "", "nothing"),
    ] {
        let error = refused(&model(*dims, 1), &config);
        assert!(error.starts_with(begins) && error.contains(advises), "{error}");
    }
    // The alternatives are accepted, and recipes with the same weight casts can be combined.
    let dir = tempfile::tempdir().unwrap();
    let qkv = ["q_proj", "k_proj", "v_proj"];
    for (i, (dims, config)) in [
        (&tiny(), config(Recipe::Rowwise, &tiny())),
        (&tiny(), config(Recipe::Tensorwise, &tiny())),
        (&short, config(Recipe::Mxfp8, &short)),
        (&odd, config(Recipe::Mxfp8, &odd).with_filter_fqns(["down_proj"])),
        (&narrow, config(Recipe::Blockwise, &narrow).with_filter_fqns(qkv)),
        (&tied, override_with(Recipe::RowwiseWithGwHp)),
    ]
    .into_iter()
    .enumerate()
    {
        let saved = model::<Flex>(*dims, 1).save_hf_float8(
            dir.path().join(i.to_string()),
            &options(),
            &Float8Export::new(&config),
        );
        saved.unwrap_or_else(|error| panic!("{i}: {error}"));
    }
}

#[test]
fn weights_that_are_not_finite_have_no_codes() {
    for (value, shown) in [(f32::NAN, "NaN"), (f32::INFINITY, "inf")] {
        let mut broken = model::<Flex>(square(true), 1);
        let up_proj = &mut broken.layers[1].mlp.as_mut().unwrap().up_proj;
        up_proj.weight = up_proj.weight.clone().map(|weight: Tensor<Flex, 2>| {
            let [rows, cols] = weight.dims();
            let at = Tensor::full([1, 1], value, &weight.device());
            weight.slice_assign([rows - 1..rows, cols - 1..cols], at)
        });
        for recipe in DYNAMIC {
            let error = refused(&broken, &config(recipe, &square(true)));
            let expected = format!(
                "model.layers.1.mlp.up_proj.weight is {shown} at element {}: it has no FP8 codes",
                128 * 256 - 1
            );
            assert_eq!(error, expected, "{recipe}");
        }
    }
}

/// A recipe without a format is refused before anything is read.
#[test]
fn flags_that_contradict_each_other() {
    let dir = tempfile::tempdir().unwrap();
    let [folder, out] = ["hf", "out"].map(|name| dir.path().join(name).to_str().unwrap().to_string());
    model::<Flex>(square(true), 1).save_hf(&folder, &options()).unwrap();
    for (flags, says) in [
        (
            &["--recipe", "rowwise"][..],
            "--recipe rowwise: is how weights are scaled that are written with --format fp8",
        ),
        (&["--format", "fp8", "--recipe", "delayed"], "there is no amax history of its inputs"),
    ] {
        let error = chain(float8(&[&["export", &folder, "--output", &out], flags].concat()).unwrap_err());
        assert!(error.contains(says), "{error}");
        assert!(!fs::exists(&out).unwrap());
    }
    let said = float8(&["export", &folder, "--output", &out, "--format", "fp8"]).unwrap();
    assert!(said.contains("tensorwise weights"), "{said}");
}
