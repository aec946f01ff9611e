//! Both forms of Hugging Face's `config.json`, defaults, and errors.

use std::fs;
use train::hf::read_config;

use llama3::{Dimensions, Error, LlamaConfig};
use serde_json::{Value, json};

use crate::common::{hf_json, llama3_scaling, refuses, tiny, tiny_with, write_json};

fn read(json: &Value) -> Result<LlamaConfig, Error> {
    let dir = tempfile::tempdir().unwrap();
    write_json(&dir.path().join("config.json"), json);
    read_config::<LlamaConfig>(dir.path())
}

/// `hf_json(tiny())` with keys replaced, or removed by `null`.
fn changed(changes: Value) -> Result<LlamaConfig, Error> {
    let mut json = hf_json(&tiny());
    for (key, value) in changes.as_object().unwrap() {
        json[key] = value.clone();
    }
    read(&json)
}

#[test]
fn the_older_form() {
    assert_eq!(changed(json!({})).unwrap(), tiny());
    let scaling = json!({
        "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192, "rope_type": "llama3",
    });
    let expected =
        LlamaConfig { rope_scaling: Some(llama3_scaling()), ..tiny_with(|dims| dims.rope_theta = 500_000.0) };
    assert_eq!(changed(json!({"rope_theta": 500000.0, "rope_scaling": scaling})).unwrap(), expected);
    // `type` is the older name of `rope_type`.
    let mut older = scaling.clone();
    older["type"] = older.as_object_mut().unwrap().remove("rope_type").unwrap();
    assert_eq!(changed(json!({"rope_theta": 500000, "rope_scaling": older})).unwrap(), expected);
    let default = json!({"rope_scaling": {"type": "default"}});
    assert_eq!(changed(default).unwrap(), tiny());
    assert_eq!(changed(json!({"partial_rotary_factor": 1.0})).unwrap(), tiny());
}

#[test]
fn the_newer_form() {
    let plain = json!({"rope_theta": null, "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}});
    assert_eq!(changed(plain).unwrap(), tiny_with(|dims| dims.rope_theta = 5000.0));
    // If both forms are present, the newer theta counts, as in transformers.
    let both = json!({"rope_theta": 7.0, "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}});
    assert_eq!(changed(both).unwrap(), tiny_with(|dims| dims.rope_theta = 5000.0));
    let scaled = json!({"rope_theta": null, "rope_parameters": {
        "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192, "rope_type": "llama3", "rope_theta": 500000.0,
    }});
    let expected =
        LlamaConfig { rope_scaling: Some(llama3_scaling()), ..tiny_with(|dims| dims.rope_theta = 500_000.0) };
    assert_eq!(changed(scaled).unwrap(), expected);
}

/// As in transformers 5, `rope_scaling` overrides `rope_parameters`, including theta.
#[test]
fn the_older_form_beside_the_newer_one() {
    let scaling = json!({"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_type": "llama3"});
    let plain = json!({"rope_type": "default", "rope_theta": 5000.0});
    let read = |more: Value| {
        let mut both = json!({"rope_theta": null, "rope_scaling": scaling, "rope_parameters": plain});
        both.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        let LlamaConfig { dims, rope_scaling } = changed(both).unwrap();
        (dims.rope_theta, rope_scaling.map(|scaling| scaling.original_max_position_embeddings))
    };
    // Without a separate length, the scaling uses the model's.
    assert_eq!(read(json!({})), (10_000.0, Some(64)));
    assert_eq!(read(json!({"rope_theta": 7.0, "original_max_position_embeddings": 32})), (7.0, Some(32)));
    assert_eq!(read(json!({"rope_scaling": {}})), (5000.0, None));
    assert_eq!(read(json!({"rope_scaling": plain, "rope_parameters": {"rope_type": "yarn"}})), (5000.0, None));
}

#[test]
fn absent_keys_have_transformers_defaults() {
    let dims = Dimensions {
        vocab_size: 32_000,
        hidden_size: 4096,
        intermediate_size: 11_008,
        num_layers: 32,
        num_heads: 32,
        num_kv_heads: 32,
        head_dim: 128,
        rms_norm_eps: 1e-6,
        rope_theta: 10_000.0,
        max_seq_len: 2048,
        tie_word_embeddings: false,
        qk_norm: false,
        moe: None,
    };
    let expected = LlamaConfig { dims, rope_scaling: None };
    assert_eq!(read(&json!({"model_type": "llama"})).unwrap(), expected);
    let derived = changed(json!({"head_dim": null, "num_key_value_heads": null})).unwrap();
    assert_eq!((derived.dims.head_dim, derived.dims.num_kv_heads), (8, 6));
}

#[test]
fn what_the_model_lacks_is_refused_by_key_and_value() {
    for (changes, key, value) in [
        (json!({"model_type": "qwen2"}), "model_type", "\"qwen2\""),
        (json!({"attention_bias": true}), "attention_bias", "true"),
        (json!({"mlp_bias": true}), "mlp_bias", "true"),
        (json!({"hidden_act": "gelu"}), "hidden_act", "\"gelu\""),
        (
            json!({"quantization_config": {"quant_method": "gptq", "bits": 4}}),
            "quantization_config.quant_method",
            "\"gptq\"",
        ),
        (json!({"rope_scaling": {"type": "linear", "factor": 2.0}}), "rope_scaling.type", "\"linear\""),
        (json!({"rope_scaling": {"rope_type": "yarn"}}), "rope_scaling.rope_type", "\"yarn\""),
        (json!({"rope_parameters": {"rope_type": "longrope"}}), "rope_parameters.rope_type", "\"longrope\""),
        (
            json!({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}),
            "rope_parameters.partial_rotary_factor",
            "0.5",
        ),
        (json!({"partial_rotary_factor": 0.5}), "partial_rotary_factor", "0.5"),
        (json!({"partial_rotary_factor": 0}), "partial_rotary_factor", "0"),
        (json!({"rope_scaling": "llama3"}), "rope_scaling", "\"llama3\""),
        (json!({"rope_scaling": {"rope_type": "default", "factor": 2.0}}), "rope_scaling.factor", "2.0"),
        (
            json!({"rope_parameters": {"rope_type": "llama3", "attention_factor": 1.5}}),
            "rope_parameters.attention_factor",
            "1.5",
        ),
        (json!({"hidden_size": -1}), "hidden_size", "-1"),
        (json!({"hidden_size": 1.5}), "hidden_size", "1.5"),
        (json!({"rms_norm_eps": "small"}), "rms_norm_eps", "\"small\""),
        (json!({"tie_word_embeddings": 1}), "tie_word_embeddings", "1"),
    ] {
        refuses(changed(changes), &format!("config.json: {key} = {value} is not supported"));
    }
}

#[test]
fn missing_keys_files_and_json_are_errors() {
    refuses(read(&json!({"hidden_size": 8})), "config.json: model_type is missing");
    let rope = json!({"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}});
    refuses(changed(rope), "rope_scaling.high_freq_factor is missing");
    refuses(changed(json!({"num_attention_heads": 0})), "model config: ");
    for (key, value) in [("num_hidden_layers", 10_000_000_000_u64), ("head_dim", 1 << 62), ("vocab_size", 9 << 59)] {
        refuses(changed(json!({key: value})), "model config: ");
    }
    // Its tables alone would take terabytes.
    let wide = json!({"head_dim": 100_000_000, "max_position_embeddings": 8192});
    refuses(changed(wide), "model config: head_dim = ");

    let dir = tempfile::tempdir().unwrap();
    refuses(read_config::<LlamaConfig>(dir.path()), "cannot read ");
    for text in ["{", "[]", "{\"model_type\": }"] {
        fs::write(dir.path().join("config.json"), text).unwrap();
        refuses(read_config::<LlamaConfig>(dir.path()), "config.json is not valid");
    }
}
