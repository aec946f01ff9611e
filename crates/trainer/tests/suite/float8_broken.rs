//! FP8 checkpoints that are not read: errors name the file and tensor, or the key and its value.

use crate::common::*;
use crate::float8_imports::{Edit, LINEAR, Recipes};

#[test]
fn broken_scales_and_codes_are_named() {
    let all = Recipes::new();
    // The text after the weight LINEAR in the file.
    for (recipe, edits, says) in table::<(Recipe, Vec<Edit>, String)>("refusals/float8_files") {
        let text = chain(all.edited(recipe, &edits).error());
        assert!(text.contains(&format!("model.safetensors: {LINEAR}.weight{says}")), "{says}: {text}");
    }
    // With a scale of 2^127, codes of at most 1 are finite.
    let edit = |own: &str, from, bytes| Edit::Bytes(own.into(), from, bytes);
    all.edited(Mxfp8, &[edit("weight_scale", 7, vec![254]), edit("weight", 224, vec![0x38; 32])]).load().unwrap();
    let mut files = all.of(Rowwise).clone();
    files.json.as_object_mut().unwrap().remove("quantization_config");
    let text = chain(files.error());
    assert!(text.contains(" holds FP8 codes, and no quantization_config in config.json says how they are"), "{text}");
    let mut files = all.of(Rowwise).clone();
    let scale = Stored::f32("lm_head.weight_scale", &[288, 1], &[1.0; 288]);
    files.tensors.insert(scale.name.clone(), scale);
    let text = chain(files.error());
    assert!(text.contains("tensors that the model does not have: lm_head.weight_scale"), "{text}");
}

#[test]
fn other_quantizations_are_refused_by_key_and_value() {
    let all = Recipes::new();
    for (recipe, key, value, says) in table::<(Recipe, String, Value, String)>("refusals/quantizations") {
        let edit = if key.is_empty() { Edit::Quantization(value) } else { Edit::At(key, value) };
        let files = all.edited(recipe, &[edit]);
        let text = chain(files.error());
        assert!(text.contains("config.json: ") && text.contains(&says), "{says}: {text}");
        // Another format is refused before the weights are read.
        if text.contains("take the folder in high precision") {
            let text = chain(read_config::<DecoderConfig>(files.folder().path()).unwrap_err());
            assert!(text.contains("config.json: ") && text.contains(&says), "{says}: {text}");
        }
    }
}
