//! Every field of a model config is checked, and the error names it.

use models::{Dimensions, LlamaConfig, MoeConfig, RopeScaling};
use train::ModelConfig;

use crate::common::{llama3_scaling, refuses, tiny, tiny_moe, tiny_with};

fn moe(num_experts: usize, num_experts_per_tok: usize) -> DecoderConfig {
    tiny_with(|dims| dims.moe = Some(MoeConfig { num_experts, num_experts_per_tok }))
}

fn refused(config: LlamaConfig) -> (&'static str, String) {
    let error = config.validate().unwrap_err().to_string();
    let (field, rest) = error.strip_prefix("model config: ").unwrap().split_once(" = ").unwrap();
    (field.to_string().leak(), rest.split(": ").next().unwrap().into())
}

#[test]
fn impossible_dimensions_are_named() {
    tiny().validate().unwrap();
    tiny_moe().validate().unwrap();
    let scaling = |change: fn(&mut RopeScaling)| {
        let mut scaling = llama3_scaling();
        change(&mut scaling);
        Some(scaling)
    };
    for (config, field, value) in [
        (tiny_with(|dims| dims.vocab_size = 0), "vocab_size", "0"),
        (tiny_with(|dims| dims.hidden_size = 0), "hidden_size", "0"),
        (tiny_with(|dims| dims.intermediate_size = 0), "intermediate_size", "0"),
        (tiny_with(|dims| dims.num_layers = 0), "num_layers", "0"),
        (tiny_with(|dims| dims.num_heads = 0), "num_heads", "0"),
        (tiny_with(|dims| dims.num_kv_heads = 0), "num_kv_heads", "0"),
        (tiny_with(|dims| dims.num_kv_heads = 4), "num_kv_heads", "4"),
        (tiny_with(|dims| dims.num_kv_heads = 12), "num_kv_heads", "12"),
        (tiny_with(|dims| dims.head_dim = 0), "head_dim", "0"),
        (tiny_with(|dims| dims.head_dim = 7), "head_dim", "7"),
        (tiny_with(|dims| dims.max_seq_len = 0), "max_seq_len", "0"),
        (moe(0, 0), "moe.num_experts", "0"),
        (moe(4, 0), "moe.num_experts_per_tok", "0"),
        (moe(4, 5), "moe.num_experts_per_tok", "5"),
        (tiny_with(|dims| dims.rms_norm_eps = 0.0), "rms_norm_eps", "0"),
        (tiny_with(|dims| dims.rms_norm_eps = f64::NAN), "rms_norm_eps", "NaN"),
        (tiny_with(|dims| dims.rope_theta = -1.0), "rope_theta", "-1"),
        (tiny_with(|dims| dims.rope_theta = f64::INFINITY), "rope_theta", "inf"),
        (DecoderConfig { rope_scaling: scaling(|s| s.factor = 0.0), ..tiny() }, "rope_scaling.factor", "0"),
        (
            DecoderConfig { rope_scaling: scaling(|s| s.low_freq_factor = 0.0), ..tiny() },
            "rope_scaling.low_freq_factor",
            "0",
        ),
        (
            DecoderConfig { rope_scaling: scaling(|s| s.high_freq_factor = 1.0), ..tiny() },
            "rope_scaling.high_freq_factor",
            "1",
        ),
        (
            DecoderConfig { rope_scaling: scaling(|s| s.original_max_position_embeddings = 0), ..tiny() },
            "rope_scaling.original_max_position_embeddings",
            "0",
        ),
    ] {
        assert_eq!(refused(config), (field, value.to_string()));
    }
}

#[test]
fn sizes_that_no_machine_holds_are_named() {
    let huge = [1 << 41, 1 << 62, 9_000_000_000_000_000_000, usize::MAX - 1];
    for value in huge {
        for (config, field) in [
            (tiny_with(|dims| dims.vocab_size = value), "vocab_size"),
            (tiny_with(|dims| dims.hidden_size = value), "hidden_size"),
            (tiny_with(|dims| dims.intermediate_size = value), "intermediate_size"),
            (tiny_with(|dims| dims.num_layers = value), "num_layers"),
            (
                tiny_with(|dims| {
                    dims.num_heads = value;
                    dims.num_kv_heads = value
                }),
                "num_heads",
            ),
            (tiny_with(|dims| dims.head_dim = value), "head_dim"),
            (tiny_with(|dims| dims.max_seq_len = value), "max_seq_len"),
            (moe(value, 1), "moe.num_experts"),
        ] {
            assert_eq!(refused(config), (field, value.to_string()));
        }
    }
    // The product is checked, not only the factors.
    let wide = tiny_with(|dims| dims.hidden_size = 10_000_000_000);
    assert_eq!(refused(wide), ("hidden_size", "10000000000".into()));
    // Every tensor has less than 2^40 elements, but their sum is too large.
    let mut deep = DecoderConfig::preset("llama3-405b").unwrap();
    deep.dims.num_layers = 10_000;
    assert_eq!(refused(deep), ("num_layers", "10000".into()));
    // All sizes at once, without an intermediate overflow.
    let all = usize::MAX - 1;
    let all = DecoderConfig {
        dims: Dimensions {
            vocab_size: all,
            hidden_size: all,
            intermediate_size: all,
            num_layers: all,
            num_heads: all,
            num_kv_heads: all,
            head_dim: all,
            ..moe(all, all).dims
        },
        ..tiny()
    };
    refuses(all.validate(), "model config: ");
    assert!(all.dims.flops_per_token(1).is_finite());
    // The largest published model is valid, and its parameters are counted correctly.
    let largest = DecoderConfig::preset("llama3-405b").unwrap();
    largest.validate().unwrap();
    assert_eq!(largest.dims.num_params(), 405_853_388_800);
}

#[test]
fn a_model_of_an_impossible_config_is_refused() {
    let config = tiny_with(|dims| dims.num_kv_heads = 4);
    let error = models::Decoder::<burn::backend::Flex>::new(config, &Default::default()).unwrap_err();
    assert_eq!(error.to_string(), "model config: num_kv_heads = 4: must divide num_heads = 6");
}

#[test]
fn an_unknown_preset_lists_the_known_ones() {
    let error = DecoderConfig::preset("7b").unwrap_err();
    assert_eq!(error.to_string(), "unknown model preset `7b`; there are debug, debug_moe, 1b, 3b, 8b, 70b, 405b");
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
