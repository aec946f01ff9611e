//! Every field of a model config is checked, and the error names it.

use models::{DecoderConfig, Dimensions, MoeConfig, RopeScaling};
use trainer::ModelConfig;

use crate::common::{llama3_scaling, tiny, tiny_moe, tiny_with};

fn moe(num_experts: usize, num_experts_per_tok: usize) -> DecoderConfig {
    tiny_with(|dims| dims.moe = Some(MoeConfig { num_experts, num_experts_per_tok }))
}

fn assert_refused(config: &DecoderConfig, field: &str, value: &str) {
    let error = config.validate().unwrap_err().to_string();
    assert!(error.starts_with(&format!("model config: {field} = {value}: ")), "{field} {value}: {error}");
}

#[test]
fn impossible_dimensions_are_named() {
    tiny().validate().unwrap();
    tiny_moe().validate().unwrap();
    type Change = fn(&mut Dimensions);
    let dimensions: [(Change, &str, &str); 15] = [
        (|dims| dims.vocab_size = 0, "vocab_size", "0"),
        (|dims| dims.hidden_size = 0, "hidden_size", "0"),
        (|dims| dims.intermediate_size = 0, "intermediate_size", "0"),
        (|dims| dims.num_layers = 0, "num_layers", "0"),
        (|dims| dims.num_heads = 0, "num_heads", "0"),
        (|dims| dims.num_kv_heads = 0, "num_kv_heads", "0"),
        (|dims| dims.num_kv_heads = 4, "num_kv_heads", "4"),
        (|dims| dims.num_kv_heads = 12, "num_kv_heads", "12"),
        (|dims| dims.head_dim = 0, "head_dim", "0"),
        (|dims| dims.head_dim = 7, "head_dim", "7"),
        (|dims| dims.max_seq_len = 0, "max_seq_len", "0"),
        (|dims| dims.rms_norm_eps = 0.0, "rms_norm_eps", "0"),
        (|dims| dims.rms_norm_eps = f64::NAN, "rms_norm_eps", "NaN"),
        (|dims| dims.rope_theta = -1.0, "rope_theta", "-1"),
        (|dims| dims.rope_theta = f64::INFINITY, "rope_theta", "inf"),
    ];
    for (change, field, value) in dimensions {
        assert_refused(&tiny_with(change), field, value);
    }
    for (config, field, value) in [
        (moe(0, 0), "num_experts", "0"),
        (moe(4, 0), "num_experts_per_tok", "0"),
        (moe(4, 5), "num_experts_per_tok", "5"),
    ] {
        assert_refused(&config, &format!("moe.{field}"), value);
    }
    type Scale = fn(&mut RopeScaling);
    let scales: [(Scale, &str, &str); 4] = [
        (|scaling| scaling.factor = 0.0, "factor", "0"),
        (|scaling| scaling.low_freq_factor = 0.0, "low_freq_factor", "0"),
        (|scaling| scaling.high_freq_factor = 1.0, "high_freq_factor", "1"),
        (|scaling| scaling.original_max_position_embeddings = 0, "original_max_position_embeddings", "0"),
    ];
    for (change, field, value) in scales {
        let mut scaling = llama3_scaling();
        change(&mut scaling);
        let config = DecoderConfig { rope_scaling: Some(scaling), ..tiny() };
        assert_refused(&config, &format!("rope_scaling.{field}"), value);
    }
}

#[test]
fn sizes_that_no_machine_holds_are_named() {
    type Change = fn(&mut Dimensions, usize);
    let changes: [(Change, &str); 7] = [
        (|dims, value| dims.vocab_size = value, "vocab_size"),
        (|dims, value| dims.hidden_size = value, "hidden_size"),
        (|dims, value| dims.intermediate_size = value, "intermediate_size"),
        (|dims, value| dims.num_layers = value, "num_layers"),
        (|dims, value| (dims.num_heads, dims.num_kv_heads) = (value, value), "num_heads"),
        (|dims, value| dims.head_dim = value, "head_dim"),
        (|dims, value| dims.max_seq_len = value, "max_seq_len"),
    ];
    for value in [1 << 41, 1 << 62, 9_000_000_000_000_000_000, usize::MAX - 1] {
        for (change, field) in changes {
            assert_refused(&tiny_with(|dims| change(dims, value)), field, &value.to_string());
        }
        assert_refused(&moe(value, 1), "moe.num_experts", &value.to_string());
    }
    // The product is checked, not only the factors.
    assert_refused(&tiny_with(|dims| dims.hidden_size = 10_000_000_000), "hidden_size", "10000000000");
    // Every tensor has less than 2^40 elements, but their sum is too large.
    let mut deep = DecoderConfig::preset("llama3-405b").unwrap();
    deep.dims.num_layers = 10_000;
    assert_refused(&deep, "num_layers", "10000");
    // All sizes at once, without an intermediate overflow.
    let mut all = moe(usize::MAX - 1, usize::MAX - 1);
    changes.iter().for_each(|(change, _)| change(&mut all.dims, usize::MAX - 1));
    all.validate().unwrap_err();
    assert!(all.dims.flops_per_token(1).is_finite());
}

#[test]
fn models_and_presets_that_cannot_be_are_refused() {
    let config = tiny_with(|dims| dims.num_kv_heads = 4);
    let error = models::Decoder::<burn::backend::Flex>::new(config, &Default::default()).unwrap_err();
    assert_eq!(error.to_string(), "model config: num_kv_heads = 4: must divide num_heads = 6");
    let error = DecoderConfig::preset("7b").unwrap_err().to_string();
    assert!(error.starts_with("unknown model preset `7b`; there are debug, llama3-debug, "), "{error}");
}

#[test]
fn only_the_experts_of_a_token_count_as_active() {
    let (config, dense) = (tiny_moe(), tiny());
    let expert = 3 * config.dims.hidden_size * config.dims.intermediate_size;
    let router = 4 * config.dims.hidden_size;
    assert_eq!(config.dims.num_params(), dense.dims.num_params() + 2 * (3 * expert + router));
    assert_eq!(config.dims.num_active_params(), dense.dims.num_params() + 2 * (expert + router));
    assert_eq!(config.dims.num_active_params() - config.dims.num_matmul_params(), 288 * 48, "the embedding's look-up");
    assert_eq!(dense.dims.num_active_params(), dense.dims.num_params());
    // The preset uses the same number of parameters per token as the dense one, plus the routers.
    let [moe, dense] = ["llama3-debug-moe", "debug"].map(|name| DecoderConfig::preset(name).unwrap());
    assert_eq!(moe.dims.num_active_params(), dense.dims.num_params() + 4 * 4 * 128);
}

#[test]
fn flops_follow_torchtitan() {
    let config = tiny();
    let not_embedding = config.dims.num_params() - config.dims.vocab_size * config.dims.hidden_size;
    let expected = 6 * not_embedding + 12 * config.dims.num_layers * config.dims.num_heads * config.dims.head_dim * 32;
    assert_eq!(config.dims.flops_per_token(32), expected as f64);
}
