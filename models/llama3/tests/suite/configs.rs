//! Every field of a model config is checked, and the error names it.

use llama3::{Error, LlamaConfig, RopeScaling};

use crate::common::{llama3_scaling, tiny};

fn refused(config: LlamaConfig) -> (&'static str, String) {
    match config.validate() {
        Err(Error::ModelConfig { field, value, .. }) => (field, value),
        other => panic!("expected a refusal, got {other:?}"),
    }
}

#[test]
fn impossible_dimensions_are_named() {
    tiny().validate().unwrap();
    let scaling = |change: fn(&mut RopeScaling)| {
        let mut scaling = llama3_scaling();
        change(&mut scaling);
        Some(scaling)
    };
    for (config, field, value) in [
        (LlamaConfig { vocab_size: 0, ..tiny() }, "vocab_size", "0"),
        (LlamaConfig { hidden_size: 0, ..tiny() }, "hidden_size", "0"),
        (LlamaConfig { intermediate_size: 0, ..tiny() }, "intermediate_size", "0"),
        (LlamaConfig { num_layers: 0, ..tiny() }, "num_layers", "0"),
        (LlamaConfig { num_heads: 0, ..tiny() }, "num_heads", "0"),
        (LlamaConfig { num_kv_heads: 0, ..tiny() }, "num_kv_heads", "0"),
        (LlamaConfig { num_kv_heads: 4, ..tiny() }, "num_kv_heads", "4"),
        (LlamaConfig { num_kv_heads: 12, ..tiny() }, "num_kv_heads", "12"),
        (LlamaConfig { head_dim: 0, ..tiny() }, "head_dim", "0"),
        (LlamaConfig { head_dim: 7, ..tiny() }, "head_dim", "7"),
        (LlamaConfig { max_seq_len: 0, ..tiny() }, "max_seq_len", "0"),
        (LlamaConfig { rms_norm_eps: 0.0, ..tiny() }, "rms_norm_eps", "0"),
        (LlamaConfig { rms_norm_eps: f64::NAN, ..tiny() }, "rms_norm_eps", "NaN"),
        (LlamaConfig { rope_theta: -1.0, ..tiny() }, "rope_theta", "-1"),
        (LlamaConfig { rope_theta: f64::INFINITY, ..tiny() }, "rope_theta", "inf"),
        (LlamaConfig { rope_scaling: scaling(|s| s.factor = 0.0), ..tiny() }, "rope_scaling.factor", "0"),
        (
            LlamaConfig { rope_scaling: scaling(|s| s.low_freq_factor = 0.0), ..tiny() },
            "rope_scaling.low_freq_factor",
            "0",
        ),
        (
            LlamaConfig { rope_scaling: scaling(|s| s.high_freq_factor = 1.0), ..tiny() },
            "rope_scaling.high_freq_factor",
            "1",
        ),
        (
            LlamaConfig { rope_scaling: scaling(|s| s.original_max_position_embeddings = 0), ..tiny() },
            "rope_scaling.original_max_position_embeddings",
            "0",
        ),
    ] {
        assert_eq!(refused(config), (field, value.to_string()));
    }
}

#[test]
fn a_model_of_an_impossible_config_is_refused() {
    let config = LlamaConfig { num_kv_heads: 4, ..tiny() };
    let error = llama3::Llama::<burn::backend::Flex>::new(config, &Default::default()).unwrap_err();
    assert_eq!(error.to_string(), "model config: num_kv_heads = 4: must divide num_heads = 6");
}

#[test]
fn an_unknown_preset_lists_the_known_ones() {
    let error = LlamaConfig::preset("7b").unwrap_err();
    assert_eq!(error.to_string(), "unknown model preset `7b`; there are debug, 1b, 3b, 8b, 70b, 405b");
}

#[test]
fn flops_follow_torchtitan() {
    let config = tiny();
    let not_embedding = config.num_params() - config.vocab_size * config.hidden_size;
    let expected = 6 * not_embedding + 12 * config.num_layers * config.num_heads * config.head_dim * 32;
    assert_eq!(config.flops_per_token(32), expected as f64);
}
