//! Errors of FP8 checkpoints name the file and tensor, or the key.

use burn_float8::Recipe;
use llama3::LlamaConfig;
use safetensors::Dtype;
use serde_json::json;
use train::hf::{Float8FilesError, read_config};

use crate::common::{Stored, cause, refuses};
use crate::float8_imports::{Files, LINEAR};

#[test]
fn broken_scales_and_codes_are_named() {
    let rowwise = Files::new(Recipe::Rowwise);
    let changed = |change: &dyn Fn(&mut Files)| {
        let mut files = rowwise.clone();
        change(&mut files);
        let error = files.float8_error();
        let text = error.to_string();
        assert!(text.contains("model.safetensors") && text.contains(LINEAR), "{text}");
        error
    };
    let scale = format!("{LINEAR}.weight_scale");
    for value in [0.0_f32, -0.5, f32::NAN, f32::INFINITY, -0.0] {
        let error = changed(&|files| files.of("weight_scale").bytes[8..12].copy_from_slice(&value.to_le_bytes()));
        let Float8FilesError::ScaleValue { name, index, .. } = &error else { panic!("{error}") };
        assert_eq!((name, *index), (&scale, 2), "{value}");
    }
    let error = changed(&|files| drop(files.tensors.remove(&scale)));
    assert!(matches!(&error, Float8FilesError::ScaleMissing { scale: missing, .. } if *missing == scale), "{error}");
    for shape in [vec![1], vec![1, 256], vec![128, 1], vec![256, 2]] {
        let error = changed(&|files| {
            let elements = shape.iter().product();
            *files.of("weight_scale") = Stored::f32(&scale, &shape, &vec![1.0; elements]);
        });
        let Float8FilesError::ScaleShape { found, expected, .. } = &error else { panic!("{error}") };
        assert_eq!((found, expected), (&shape, &vec![vec![256, 1], vec![256]]));
    }
    let error = changed(&|files| {
        let stored = files.of("weight_scale");
        (stored.dtype, stored.bytes) = (Dtype::U8, vec![127; 256]);
    });
    assert!(matches!(&error, Float8FilesError::ScaleDtype { .. }), "{error}");
    for code in [0x7f, 0xff] {
        let error = changed(&|files| files.of("weight").bytes[3 * 128 + 5] = code);
        assert!(
            matches!(error, Float8FilesError::NanCode { row: 3, col: 5, code: found, .. } if found == code),
            "{error}"
        );
    }
    let mut files = rowwise.clone();
    files.json.as_object_mut().unwrap().remove("quantization_config");
    let error = files.float8_error();
    assert!(
        matches!(&error, Float8FilesError::NoConfig { path, .. } if path.ends_with("model.safetensors")),
        "{error}"
    );

    let mut twice = Files::new(Recipe::Blockwise);
    let scale = twice.of("weight_scale_inv").clone();
    let name = format!("{LINEAR}.weight_scale");
    twice.tensors.insert(name.clone(), Stored { name, ..scale });
    assert!(matches!(twice.float8_error(), Float8FilesError::ScaleTwice { .. }));

    let mut mxfp8 = Files::new(Recipe::Mxfp8);
    mxfp8.of("weight_scale").bytes[7] = 255;
    assert!(matches!(mxfp8.float8_error(), Float8FilesError::ScaleValue { index: 7, value, .. } if value.is_nan()));
    // Scale 2^127: codes of at most 1 are finite, larger ones overflow.
    let mut mxfp8 = Files::new(Recipe::Mxfp8);
    mxfp8.of("weight_scale").bytes[7] = 254;
    mxfp8.of("weight").bytes[128 + 96..2 * 128].fill(0x38);
    mxfp8.load().unwrap();
    mxfp8.of("weight").bytes[128 + 100] = 0xfe;
    let error = mxfp8.float8_error();
    assert!(matches!(error, Float8FilesError::Overflow { row: 1, col: 100, code: 0xfe, .. }), "{error}");
    let text = error.to_string();
    assert!(text.contains("model.safetensors") && text.contains(&format!("{LINEAR}.weight is beyond f32")), "{text}");
    // A scale without codes is not a tensor of the model.
    let mut files = rowwise.clone();
    files.tensors.insert("lm_head.weight_scale".into(), Stored::f32("lm_head.weight_scale", &[288, 1], &[1.0; 288]));
    assert!(files.error().to_string().contains("lm_head.weight_scale"));
    let mut files = rowwise.clone();
    files.of("weight").shape = vec![128, 256];
    assert!(matches!(cause(files.load()), train::TensorFilesError::Shape { .. }));
}

#[test]
fn schemes_that_are_not_read_are_refused_by_key() {
    let rowwise = Files::new(Recipe::Rowwise);
    let group = "/quantization_config/config_groups/group_0";
    let inputs = "quantization_config.config_groups.*.input_activations";
    for (place, value, key) in [
        ("/quantization_config/quant_method", json!("gptq"), "quantization_config.quant_method"),
        ("/quantization_config/format", json!("pack-quantized"), "quantization_config.format"),
        ("/quantization_config/quantization_status", json!("calibration"), "quantization_config.quantization_status"),
        ("/quantization_config/config_groups", json!({"FP8": ["Linear"]}), "quantization_config.config_groups"),
        (
            &format!("{group}/output_activations"),
            json!({"num_bits": 8}),
            "quantization_config.config_groups.*.output_activations",
        ),
        (&format!("{group}/weights/num_bits"), json!(4), "quantization_config.config_groups.*.weights.num_bits"),
        (&format!("{group}/weights/type"), json!("int"), "quantization_config.config_groups.*.weights.type"),
        (
            &format!("{group}/weights/strategy"),
            json!("attn_head"),
            "quantization_config.config_groups.*.weights.strategy",
        ),
        (&format!("{group}/weights/strategy"), json!("group"), "quantization_config.config_groups.*.weights.strategy"),
        (
            &format!("{group}/weights/strategy"),
            json!("block"),
            "quantization_config.config_groups.*.weights.block_structure",
        ),
        (&format!("{group}/weights/symmetric"), json!(false), "quantization_config.config_groups.*.weights.symmetric"),
        (&format!("{group}/weights/dynamic"), json!(true), "quantization_config.config_groups.*.weights.dynamic"),
        (&format!("{group}/input_activations/num_bits"), json!(4), &format!("{inputs}.num_bits")),
        (&format!("{group}/input_activations/type"), json!("int"), &format!("{inputs}.type")),
        (&format!("{group}/input_activations/symmetric"), json!(false), &format!("{inputs}.symmetric")),
        (&format!("{group}/input_activations/strategy"), json!("attn_head"), &format!("{inputs}.strategy")),
        (&format!("{group}/input_activations/strategy"), json!("group"), &format!("{inputs}.group_size")),
        (&format!("{group}/input_activations/dynamic"), json!("local"), &format!("{inputs}.dynamic")),
    ] {
        let mut files = rowwise.clone();
        *files.json.pointer_mut(place).unwrap() = value;
        let refused = [files.load().map(drop), read_config::<LlamaConfig>(files.folder().path()).map(drop)];
        for result in refused {
            refuses(result, &format!("config.json: {key} = "));
        }
    }
    // Keys of other programs, with advice.
    for (config, key) in [
        (json!({"quant_method": "modelopt", "quant_algo": "NVFP4"}), "quant_algo"),
        (
            json!({"quant_method": "quark", "global_quant_config": {"weight": {"dtype": "fp4", "qscheme": "per_group"}}}),
            "global_quant_config.weight.dtype",
        ),
        (json!({"quant_method": "awq"}), "quant_method"),
    ] {
        let mut files = rowwise.clone();
        *files.quantization() = config;
        let text = files.error().to_string();
        assert!(
            text.contains(&format!("quantization_config.{key} = ")) && text.contains("in high precision"),
            "{text}"
        );
    }
    let mut nameless = rowwise.clone();
    *nameless.quantization() = json!({"ignore": []});
    let error = nameless.error().to_string();
    assert!(error.contains("quantization_config.quant_method") && error.contains("config.json"), "{error}");
    let mut frozen = rowwise.clone();
    frozen.quantization()["quantization_status"] = json!("frozen");
    assert!(frozen.bits() == rowwise.bits());
    let mut blockwise = Files::new(Recipe::Blockwise);
    for (own, value) in [
        ("weight_block_size", json!([64, 128])),
        ("fmt", json!("e5m2")),
        ("scale_fmt", json!("e4m3")),
        ("activation_scheme", json!("sometimes")),
        ("modules_to_convert", json!(["embed_tokens"])),
        ("modules_to_not_convert", json!("lm_head")),
    ] {
        let before = blockwise.quantization()[own].clone();
        blockwise.quantization()[own] = value;
        refuses(blockwise.load(), &format!(": quantization_config.{own} = "));
        blockwise.quantization()[own] = before;
    }
    blockwise.load().unwrap();
}
