//! Both forms of Hugging Face's `config.json`, defaults, and errors.

use std::fs;
use trainer::hf::read_config;

use anyhow::Error;
use models::{DecoderConfig, Dimensions};
use serde_json::{Value, json};

use crate::common::{chain, hf_json, llama3_scaling, tiny, tiny_with, write_json};

fn read(json: &Value) -> Result<DecoderConfig, Error> {
    let dir = tempfile::tempdir().unwrap();
    write_json(&dir.path().join("config.json"), json);
    read_config::<DecoderConfig>(dir.path())
}

/// `hf_json(tiny())` with keys replaced, or removed by `null`.
fn changed(changes: Value) -> Result<DecoderConfig, Error> {
    let mut json = hf_json(&tiny());
    for (key, value) in changes.as_object().unwrap() {
        json[key] = value.clone();
    }
    read(&json)
}

#[test]
fn both_forms_of_the_rotary_frequencies() {
    let scaling = |kind: &str, more: Value| {
        let mut scaling = json!({
            "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192, kind: "llama3",
        });
        scaling.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        scaling
    };
    let theta = |theta: f64| tiny_with(|dims| dims.rope_theta = theta);
    let scaled = DecoderConfig { rope_scaling: Some(llama3_scaling()), ..theta(500_000.0) };
    let plain = json!({"rope_type": "default", "rope_theta": 5000.0});
    for (changes, expected) in [
        (json!({}), tiny()),
        (json!({"rope_theta": 500000.0, "rope_scaling": scaling("rope_type", json!({}))}), scaled),
        // `type` is the older name of `rope_type`.
        (json!({"rope_theta": 500000, "rope_scaling": scaling("type", json!({}))}), scaled),
        (json!({"rope_scaling": {"type": "default"}}), tiny()),
        (json!({"partial_rotary_factor": 1.0}), tiny()),
        (json!({"rope_theta": null, "rope_parameters": plain}), theta(5000.0)),
        // If both forms are present, the newer theta counts, as in transformers.
        (json!({"rope_theta": 7.0, "rope_parameters": plain}), theta(5000.0)),
        (json!({"rope_theta": null, "rope_parameters": scaling("rope_type", json!({"rope_theta": 500000.0}))}), scaled),
    ] {
        assert_eq!(changed(changes.clone()).unwrap(), expected, "{changes}");
    }
}

/// As in transformers 5, `rope_scaling` overrides `rope_parameters`, including theta.
#[test]
fn the_older_form_beside_the_newer_one() {
    let scaling = json!({"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_type": "llama3"});
    let plain = json!({"rope_type": "default", "rope_theta": 5000.0});
    let read = |more: Value| {
        let mut both = json!({"rope_theta": null, "rope_scaling": scaling, "rope_parameters": plain});
        both.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        let DecoderConfig { dims, rope_scaling, .. } = changed(both).unwrap();
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
        qkv_bias: false,
        moe: None,
    };
    let expected = DecoderConfig { dims, ..tiny() };
    assert_eq!(read(&json!({"model_type": "llama"})).unwrap(), expected);
    let derived = changed(json!({"head_dim": null, "num_key_value_heads": null})).unwrap();
    assert_eq!((derived.dims.head_dim, derived.dims.num_kv_heads), (8, 6));
}

#[test]
fn what_the_model_lacks_is_refused_by_key_and_value() {
    let parameters = |kind: &str, key: &str, value: f64| json!({"rope_parameters": {"rope_type": kind, key: value}});
    for (changes, told) in [
        (json!({"model_type": "gpt2"}), "model_type = \"gpt2\" is not supported; "),
        (json!({"model_type": null}), "model_type is missing"),
        (json!({"attention_bias": true}), "attention_bias = true is not supported; "),
        (json!({"mlp_bias": true}), "mlp_bias = true is not"),
        (json!({"hidden_act": "gelu"}), "hidden_act = \"gelu\" is not"),
        (
            json!({"quantization_config": {"quant_method": "gptq"}}),
            "quantization_config.quant_method = \"gptq\" is not",
        ),
        (json!({"rope_scaling": {"type": "linear", "factor": 2.0}}), "rope_scaling.type = \"linear\" is not"),
        (json!({"rope_scaling": {"rope_type": "yarn"}}), "rope_scaling.rope_type = \"yarn\" is not"),
        (json!({"rope_scaling": "llama3"}), "rope_scaling = \"llama3\" is not supported; it must be an object"),
        (json!({"rope_scaling": {"rope_type": "default", "factor": 2.0}}), "rope_scaling.factor = 2.0 is not"),
        (json!({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}), "rope_scaling.low_freq_factor is missing"),
        (json!({"rope_parameters": {"rope_type": "longrope"}}), "rope_parameters.rope_type = \"longrope\" is not"),
        (parameters("default", "partial_rotary_factor", 0.5), "rope_parameters.partial_rotary_factor = 0.5 is not"),
        (parameters("llama3", "attention_factor", 1.5), "rope_parameters.attention_factor = 1.5 is not"),
        (json!({"partial_rotary_factor": 0.5}), "partial_rotary_factor = 0.5 is not"),
        (json!({"partial_rotary_factor": 0}), "partial_rotary_factor = 0 is not"),
        (json!({"hidden_size": -1}), "hidden_size = -1 is not supported; it must be a non-negative integer"),
        (json!({"hidden_size": 1.5}), "hidden_size = 1.5 is not"),
        (json!({"rms_norm_eps": "small"}), "rms_norm_eps = \"small\" is not supported; it must be a number"),
        (json!({"tie_word_embeddings": 1}), "tie_word_embeddings = 1 is not supported; it must be true or false"),
    ] {
        let error = chain(changed(changes).unwrap_err());
        assert!(error.contains(&format!("config.json: {told}")), "{told}: {error}");
    }
    // Dimensions that are not valid. The tables of the last one alone would take terabytes.
    for (changes, told) in [
        (json!({"num_attention_heads": 0}), "num_heads = 0"),
        (json!({"num_hidden_layers": 10_000_000_000_u64}), "num_layers = 10000000000"),
        (json!({"head_dim": 1_u64 << 62}), "head_dim = "),
        (json!({"vocab_size": 9_u64 << 59}), "vocab_size = "),
        (json!({"head_dim": 100_000_000, "max_position_embeddings": 8192}), "head_dim = 100000000"),
    ] {
        let error = chain(changed(changes).unwrap_err());
        assert!(error.starts_with("model config: ") && error.contains(told), "{told}: {error}");
    }
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("config.json");
    let error = || chain(read_config::<DecoderConfig>(dir.path()).unwrap_err());
    assert!(error().starts_with(&format!("cannot read {}: ", path.display())), "{}", error());
    for text in ["{", "[]", "{\"model_type\": }"] {
        fs::write(&path, text).unwrap();
        assert!(error().starts_with(&format!("{} is not valid: ", path.display())), "{text}: {}", error());
    }
}
