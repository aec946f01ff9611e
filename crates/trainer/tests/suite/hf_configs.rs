//! Both forms of Hugging Face's `config.json`, defaults, and errors.

use crate::common::*;

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

/// Keys of a feature that the model lacks, and impossible dimensions. The tables of the last one
/// would take terabytes.
#[test]
fn what_the_model_lacks_is_refused_by_key_and_value() {
    for (changes, told) in table::<(Value, String)>("refusals/hf_configs") {
        let error = chain(changed(changes).unwrap_err());
        assert!(error.contains(&told), "{told}: {error}");
    }
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("config.json");
    let error = || chain(read_config::<DecoderConfig>(dir.path()).unwrap_err());
    assert!(error().starts_with(&format!("cannot read {}: ", path.display())), "{}", error());
    for text in ["{", "[]"] {
        fs::write(&path, text).unwrap();
        assert!(error().starts_with(&format!("{} is not valid: ", path.display())), "{text}: {}", error());
    }
}
