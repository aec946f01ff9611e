//! FP8 exports that readers would not accept are refused. The error names the layer and an
//! alternative, and no files are left.

use crate::common::*;
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
fn with(sizes: &[(&str, usize)]) -> DecoderConfig {
    let mut config = square(true);
    for (name, size) in sizes {
        match *name {
            "num_kv_heads" => config.dims.num_kv_heads = *size,
            "intermediate_size" => config.dims.intermediate_size = *size,
            _ => config.dims.tie_word_embeddings = *size != 0,
        }
    }
    config
}

/// A row has other dimensions of the square model, a configuration, how the error begins, and the
/// choice that it names. The choices are accepted, and recipes with the same weight casts can be
/// combined.
#[test]
fn what_readers_cannot_take_is_refused_with_another_choice() {
    type Row = (BTreeMap<String, usize>, Float8Config, String, String);
    for (sizes, config, begins, advises) in table::<Row>("refusals/float8_exports") {
        let sizes: Vec<_> = sizes.iter().map(|(name, size)| (&**name, *size)).collect();
        let error = refused(&model(with(&sizes), 1), &config);
        assert!(error.starts_with(&begins) && error.contains(&advises), "{error}");
    }
    let dir = tempfile::tempdir().unwrap();
    let (tied, tiny, odd) = (square(true), tiny(), with(&[("intermediate_size", 272)]));
    let (short, narrow) = (with(&[("intermediate_size", 320)]), with(&[("num_kv_heads", 2)]));
    let mixed = config(Rowwise, &tied).with_override(["*.down_proj"], Float8LinearConfig::new(Recipe::RowwiseWithGwHp));
    for (i, (dims, config)) in [
        (tiny, config(Rowwise, &tiny)),
        (tiny, config(Tensorwise, &tiny)),
        (short, config(Mxfp8, &short)),
        (odd, config(Mxfp8, &odd).with_filter_fqns(["down_proj"])),
        (narrow, config(Blockwise, &narrow).with_filter_fqns(["q_proj", "k_proj", "v_proj"])),
        (tied, mixed),
    ]
    .into_iter()
    .enumerate()
    {
        let to = dir.path().join(i.to_string());
        model::<Flex>(dims, 1).save_hf_float8(to, &options(), &Float8Export::new(&config)).unwrap();
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
            let expected =
                format!("model.layers.1.mlp.up_proj.weight is {shown} at element 32767: it has no FP8 codes");
            assert_eq!(error, expected, "{recipe}");
        }
    }
}

/// A recipe without a format is refused before anything is read.
#[test]
fn flags_that_contradict_each_other() {
    let dir = tempfile::tempdir().unwrap();
    let [folder, out] = ["hf", "out"].map(|name| dir.path().join(name));
    model::<Flex>(square(true), 1).save_hf(&folder, &options()).unwrap();
    let alone = "--recipe rowwise: needs --format fp8";
    for (flags, says) in [
        (&["--recipe", "rowwise"][..], alone),
        (&["--format", "fp8", "--recipe", "delayed"], "there is no amax history of its inputs"),
    ] {
        let error = chain(exported(&folder, &out, flags).unwrap_err());
        assert!(error.contains(says), "{error}");
        assert!(!fs::exists(&out).unwrap());
    }
    let said = exported(&folder, &out, &["--format", "fp8"]).unwrap();
    assert!(said.contains("tensorwise weights"), "{said}");
}
