//! FP8 checkpoints that are not read: errors name the file and tensor, or the key and its value.

use burn_float8::Recipe::{Blockwise, Mxfp8, Rowwise, Tensorwise};
use models::DecoderConfig;
use safetensors::Dtype;
use serde_json::{Value, json};
use trainer::hf::read_config;

use crate::common::{Stored, chain};
use crate::float8_exports::DYNAMIC;
use crate::float8_imports::{Files, LINEAR, with_inputs};

/// Change of a checkpoint.
type Change<'a> = &'a dyn Fn(&mut Files);

#[test]
fn broken_scales_and_codes_are_named() {
    let all = DYNAMIC.map(|recipe| (recipe, Files::new(recipe)));
    let scale = |bytes: [u8; 4]| move |files: &mut Files| files.of("weight_scale").bytes[8..12].copy_from_slice(&bytes);
    let shape = |shape: &'static [usize]| {
        move |files: &mut Files| {
            let values = vec![1.0; shape.iter().product()];
            *files.of("weight_scale") = Stored::f32(&format!("{LINEAR}.weight_scale"), shape, &values);
        }
    };
    let code = |code: u8| move |files: &mut Files| files.of("weight").bytes[3 * 128 + 5] = code;
    let list = |key: &'static str, list: Value| move |files: &mut Files| files.quantization()[key] = list.clone();
    let fp8 = |key: &'static str, names: &'static [&'static str]| {
        move |files: &mut Files| {
            *files.quantization() = json!({"quant_method": "fp8", "weight_block_size": [128, 128], key: names})
        }
    };
    let remove = |own: &'static str| move |files: &mut Files| drop(files.tensors.remove(&format!("{LINEAR}.{own}")));
    let weight = |files: &mut Files, own: &str| files.tensors[&format!("{LINEAR}.{own}")].clone();
    // The text after the file, or after the weight LINEAR in it.
    let cases: &[(_, Change<'_>, &str)] = &[
        (Rowwise, &scale(0.0_f32.to_le_bytes()), "_scale has 0 at 2, and scales of codes that are not all 0"),
        (Rowwise, &scale((-0.5_f32).to_le_bytes()), "_scale has -0.5 at 2, "),
        (Rowwise, &scale((-0.0_f32).to_le_bytes()), "_scale has 0 at 2, "),
        (Rowwise, &scale(f32::NAN.to_le_bytes()), "_scale has NaN at 2, "),
        (Rowwise, &scale(f32::INFINITY.to_le_bytes()), "_scale has inf at 2, "),
        (Mxfp8, &|files| files.of("weight_scale").bytes[7] = 255, "_scale has NaN at 7, "),
        (Rowwise, &shape(&[1]), "_scale has shape [1], for a weight [256, 128] it must be [256, 1] or [256]"),
        (Rowwise, &shape(&[1, 256]), "_scale has shape [1, 256], "),
        (Rowwise, &shape(&[256, 2]), "_scale has shape [256, 2], "),
        (
            Rowwise,
            &|files| (files.of("weight_scale").dtype, files.of("weight_scale").bytes) = (Dtype::U8, vec![127; 256]),
            "_scale has dtype U8; F32, BF16, F16 and F8_E8M0 are read",
        ),
        (Rowwise, &remove("weight_scale"), " holds FP8 codes, and its scale is not there: model.layers.0.mlp.up_proj."),
        (
            Tensorwise,
            &|files| {
                with_inputs("input_scale")(files);
                remove("input_scale")(files);
                *files.quantization() = json!({"quant_method": "fp8", "activation_scheme": "static"});
            },
            " holds FP8 codes, and the scale of its inputs is not there: model.layers.0.mlp.up_proj.input_scale",
        ),
        (Rowwise, &code(0x7f), " has the code 0x7f, which is NaN, in row 3, column 5"),
        (Rowwise, &code(0xff), " has the code 0xff, which is NaN, in row 3, column 5"),
        // Scale 2^127: codes of at most 1 are finite, larger ones overflow.
        (
            Mxfp8,
            &|files| {
                files.of("weight_scale").bytes[7] = 254;
                files.of("weight").bytes[128 + 96..2 * 128].fill(0x38);
                files.load().unwrap();
                files.of("weight").bytes[128 + 100] = 0xfe;
            },
            " is beyond f32 in row 1, column 100: the code 0xfe with the scale 1.7014118e38",
        ),
        (
            Blockwise,
            &|files| {
                let scale = Stored { name: format!("{LINEAR}.weight_scale"), ..weight(files, "weight_scale_inv") };
                files.tensors.insert(scale.name.clone(), scale);
            },
            "_scale and model.layers.0.mlp.up_proj.weight_scale_inv are two names of one scale",
        ),
        (
            Rowwise,
            &|files| files.of("weight").shape = vec![128, 256],
            " has shape [128, 256], the model needs [256, 128]",
        ),
        // Codes that lists leave out, in the words of each program.
        (
            Rowwise,
            &list("ignore", json!([LINEAR])),
            " holds FP8 codes, but by quantization_config model.layers.0.mlp.up_proj is not",
        ),
        (Rowwise, &list("ignore", json!(["re:.*up_proj"])), " holds FP8 codes, but by "),
        (Blockwise, &fp8("modules_to_not_convert", &["lm_head", "up_proj"]), " holds FP8 codes, but by "),
        (Blockwise, &fp8("ignored_layers", &["re:.*\\.0\\.mlp\\.up"]), " holds FP8 codes, but by "),
        (Blockwise, &fp8("ignored_layers", &["model.layers.0.mlp.up_proj"]), " holds FP8 codes, but by "),
        (
            Rowwise,
            &|files| {
                *files.quantization() =
                    json!({"quant_algo": "FP8_PER_CHANNEL_PER_TOKEN", "exclude_modules": ["*.0*.up_proj"]})
            },
            " holds FP8 codes, but by ",
        ),
        (
            Rowwise,
            &|files| {
                files.quantization()["config_groups"]["group_0"]["targets"] = json!(["re:.*(q|k|v|o|gate|down)_proj"])
            },
            " holds FP8 codes, but by ",
        ),
    ];
    for (recipe, change, says) in cases {
        let mut files = all.iter().find(|(of, _)| of == recipe).unwrap().1.clone();
        change(&mut files);
        let text = chain(files.error());
        assert!(text.contains(&format!("model.safetensors: {LINEAR}.weight{says}")), "{says}: {text}");
    }
    let mut files = all[1].1.clone();
    files.json.as_object_mut().unwrap().remove("quantization_config");
    let text = chain(files.error());
    assert!(text.contains(" holds FP8 codes, and no quantization_config in config.json says how they are"), "{text}");
    let mut files = all[1].1.clone();
    let scale = Stored::f32("lm_head.weight_scale", &[288, 1], &[1.0; 288]);
    files.tensors.insert(scale.name.clone(), scale);
    let text = chain(files.error());
    assert!(text.contains("tensors that the model does not have: lm_head.weight_scale"), "{text}");
}

#[test]
fn other_quantizations_are_refused_by_key_and_value() {
    let [rowwise, blockwise] = [Rowwise, Blockwise].map(Files::new);
    let group = "config_groups.group_0";
    let [weights, inputs] = ["weights", "input_activations"].map(|own| format!("{group}.{own}"));
    let quark =
        json!({"quant_method": "quark", "global_quant_config": {"weight": {"dtype": "fp4", "qscheme": "per_group"}}});
    // Key, value, and the key that tells, if it is another one.
    for (files, key, value, tells) in [
        (&rowwise, "quant_method", json!("gptq"), None),
        (&rowwise, "format", json!("pack-quantized"), None),
        (&rowwise, "quantization_status", json!("calibration"), None),
        (&rowwise, "transform_config", json!({"R1": {}}), None),
        (&rowwise, &format!("{group}.output_activations"), json!({"num_bits": 8}), None),
        (&rowwise, &format!("{weights}.num_bits"), json!(4), None),
        (&rowwise, &format!("{weights}.type"), json!("int"), None),
        (&rowwise, &format!("{weights}.strategy"), json!("attn_head"), None),
        (&rowwise, &format!("{weights}.strategy"), json!("group"), Some("weights.group_size = null")),
        (&rowwise, &format!("{weights}.strategy"), json!("block"), Some("weights.block_structure = null")),
        (&rowwise, &format!("{weights}.symmetric"), json!(false), None),
        (&rowwise, &format!("{weights}.dynamic"), json!(true), None),
        (&rowwise, &format!("{inputs}.num_bits"), json!(4), None),
        (&rowwise, &format!("{inputs}.type"), json!("int"), None),
        (&rowwise, &format!("{inputs}.symmetric"), json!(false), None),
        (&rowwise, &format!("{inputs}.strategy"), json!("attn_head"), None),
        (&rowwise, &format!("{inputs}.strategy"), json!("group"), Some("input_activations.group_size = null")),
        (&rowwise, &format!("{inputs}.dynamic"), json!("local"), None),
        (&blockwise, "weight_block_size", json!([64, 128]), None),
        (&blockwise, "fmt", json!("e5m2"), None),
        (&blockwise, "scale_fmt", json!("e4m3"), None),
        (&blockwise, "activation_scheme", json!("sometimes"), None),
        (&blockwise, "modules_to_convert", json!(["embed_tokens"]), None),
        (&rowwise, "", json!({"quant_method": "modelopt", "quant_algo": "NVFP4"}), Some("quant_algo = \"NVFP4\"")),
        (&rowwise, "", quark, Some("global_quant_config.weight.dtype = \"fp4\"")),
    ] {
        let mut files = files.clone();
        match key {
            "" => *files.quantization() = value.clone(),
            _ => {
                let place = key.split('.').fold(files.quantization(), |json, key| &mut json[key]);
                *place = value.clone();
            }
        }
        let told = format!("quantization_config.{} = {value} ", key.replace("group_0", "*"));
        for error in [files.error(), read_config::<DecoderConfig>(files.folder().path()).map(drop).unwrap_err()] {
            let text = chain(error);
            let is_told =
                tells.map_or(text.contains(&told), |tells| text.contains(&format!("{tells} is not supported")));
            assert!(
                is_told && text.contains("config.json: ") && text.contains("take the folder in high precision"),
                "{text}"
            );
        }
    }
    // Keys of another type, or without a value; a pattern that is no regex.
    for (files, key, value, says) in [
        (
            &rowwise,
            "config_groups",
            json!({"FP8": ["Linear"]}),
            "config_groups = {\"FP8\":[\"Linear\"]} is not supported; it must be an object of",
        ),
        (&rowwise, "config_groups", Value::Null, "quantization_config.config_groups is missing"),
        (&rowwise, "quant_method", json!(8), "quant_method = 8 is not supported; it must be a string"),
        (&blockwise, "quant_method", Value::Null, "quantization_config.quant_method is missing"),
        (&blockwise, "modules_to_not_convert", json!("lm_head"), "it must be a list of strings"),
        (
            &rowwise,
            "ignore",
            json!(["re:(lm_head"]),
            "quantization_config.ignore: the pattern \"re:(lm_head\" cannot be matched: ",
        ),
        (
            &rowwise,
            "ignore",
            json!([r"re:(.*)*\1(a|aa)+$"]),
            "cannot be matched with model.layers.0.self_attn.q_proj: ",
        ),
    ] {
        let mut files = files.clone();
        files.quantization()[key] = value;
        let text = chain(files.error());
        assert!(text.contains("config.json: quantization_config.") && text.contains(says), "{says}: {text}");
    }
}
