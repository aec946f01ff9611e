//! Both forms of Hugging Face's `config.json`, defaults, and errors.

use crate::common::*;
use models::RopeScaling;

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

/// `type` is the older name of `rope_type`. If theta is in both forms, the newer counts, as in
/// transformers; `rope_scaling` overrides `rope_parameters`, including theta, as in transformers 5.
/// Without a separate length, the scaling uses the model's. A row has keys, theta, and the length.
#[test]
fn both_forms_of_the_rotary_frequencies() {
    for (changes, theta, length) in table::<(Value, f64, Option<usize>)>("vectors/rotary_configs") {
        let mut expected = tiny_with(|dims| dims.rope_theta = theta);
        expected.rope_scaling =
            length.map(|length| RopeScaling { original_max_position_embeddings: length, ..llama3_scaling() });
        assert_eq!(changed(changes.clone()).unwrap(), expected, "{changes}");
    }
}

#[test]
fn absent_keys_have_transformers_defaults() {
    let DecoderConfig { dims, rope_scaling, .. } = read(&json!({"model_type": "llama"})).unwrap();
    let sizes = [dims.vocab_size, dims.hidden_size, dims.intermediate_size, dims.num_layers, dims.num_heads];
    assert_eq!(sizes, [32_000, 4096, 11_008, 32, 32]);
    assert_eq!((dims.num_kv_heads, dims.head_dim, dims.max_seq_len), (32, 128, 2048));
    assert_eq!((dims.rms_norm_eps, dims.rope_theta, rope_scaling), (1e-6, 10_000.0, None));
    assert!(!(dims.tie_word_embeddings || dims.qk_norm || dims.qkv_bias) && dims.moe.is_none());
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
