//! The forward pass: causality, caching, head sharing, tied output, initial weights.

use burn::backend::{Autodiff, Flex};
use burn::module::Module;
use models::KvCache;
use models::presets;
use models::{Decoder, DecoderConfig, Dimensions};
use trainer::CacheOptions;
use trainer::ModelConfig;

use crate::common::{ids, model, relative, tiny, tiny_moe, tiny_with, tokens, values};

#[test]
fn a_later_token_leaves_earlier_logits_alone() {
    let model = model::<Flex>(tiny(), 1);
    let mut tokens = tokens([2, 9], 288, 1);
    let before = values(model.forward(ids(&tokens, [2, 9])));
    tokens[5] = (tokens[5] + 1) % 288;
    let after = values(model.forward(ids(&tokens, [2, 9])));

    let differs = |at: usize| before[at * 288..][..288] != after[at * 288..][..288];
    assert!((0..5).all(|at| !differs(at)), "positions before the change");
    assert!((5..9).all(differs), "the changed position and those after it");
    assert!((9..18).all(|at| !differs(at)), "the other sequence");
}

#[test]
fn cached_logits_are_those_of_the_whole_sequence() {
    for config in [tiny(), tiny_moe()] {
        let model = model::<Flex>(config, 2);
        let tokens = tokens([1, 10], 288, 2);
        let whole = values(model.forward(ids(&tokens, [1, 10])));
        let mut cache = KvCache::new(2, &CacheOptions::default());
        // A prompt, a single token, and several tokens after a past.
        for (start, end) in [(0, 4), (4, 5), (5, 10)] {
            let part = ids(&tokens[start..end], [1, end - start]);
            let last = values(model.forward_cached(part, &mut cache));
            assert_eq!(cache.len(), end);
            assert!(relative(&last, &whole[(end - 1) * 288..][..288]) < 1e-5);
        }
    }
}

#[test]
fn shared_key_heads_equal_repeated_ones() {
    let config = tiny();
    let (heads, kv, d) = (config.dims.num_heads, config.dims.num_kv_heads, config.dims.head_dim);
    let shared = model::<Flex>(config, 3);
    let mut repeated =
        model::<Flex>(DecoderConfig { dims: Dimensions { num_kv_heads: heads, ..config.dims }, ..config }, 3);
    for (layer, source) in repeated.layers.iter_mut().zip(&shared.layers) {
        let repeat = |weight: burn::tensor::Tensor<Flex, 2>| {
            let rows = weight.dims()[0];
            let grouped = weight.reshape([rows, kv, 1, d]).repeat_dim(2, heads / kv);
            grouped.reshape([rows, heads * d])
        };
        let (attn, from) = (&mut layer.self_attn, &source.self_attn);
        attn.q_proj = from.q_proj.clone();
        attn.o_proj = from.o_proj.clone();
        attn.k_proj.weight = attn.k_proj.weight.clone().map(|_| repeat(from.k_proj.weight.val()));
        attn.v_proj.weight = attn.v_proj.weight.clone().map(|_| repeat(from.v_proj.weight.val()));
    }
    let tokens = tokens([2, 7], 288, 3);
    let [a, b] = [&shared, &repeated].map(|model| values(model.forward(ids(&tokens, [2, 7]))));
    assert!(relative(&a, &b) < 1e-5);
}

#[test]
fn sequences_beyond_the_tables_work() {
    let short = model::<Flex>(tiny_with(|dims| dims.max_seq_len = 4), 4);
    let long = model::<Flex>(tiny(), 4);
    let tokens = tokens([1, 11], 288, 4);
    let [a, b] = [short, long].map(|model| values(model.forward(ids(&tokens, [1, 11]))));
    assert_eq!(a, b);
}

#[test]
fn loss_is_the_mean_negative_log_likelihood() {
    let model = model::<Flex>(tiny(), 5);
    let (inputs, targets) = (tokens([2, 6], 288, 5), tokens([2, 6], 288, 6));
    let logits = values(model.forward(ids(&inputs, [2, 6])));
    let nats = |(&target, row): (&i32, &[f32])| {
        row.iter().map(|&logit| f64::from(logit).exp()).sum::<f64>().ln() - f64::from(row[target as usize])
    };
    let expected = targets.iter().zip(logits.chunks(288)).map(nats).sum::<f64>() / 12.0;
    let loss = values(model.loss(ids(&inputs, [2, 6]), ids(&targets, [2, 6])))[0];
    assert!((f64::from(loss) - expected).abs() < 1e-5, "{loss} {expected}");
}

#[test]
fn a_tied_output_has_no_parameter_of_its_own_and_trains_the_embedding() {
    let config = tiny_with(|dims| dims.tie_word_embeddings = true);
    let model = model::<Autodiff<Flex>>(config, 6);
    assert!(model.lm_head.is_none());
    let (inputs, targets) = (vec![1; 4], vec![7; 4]);
    let grads = model.loss(ids(&inputs, [1, 4]), ids(&targets, [1, 4])).backward();
    let grad = values(model.embed_tokens.weight.val().grad(&grads).unwrap());
    // Token 7 is never looked up, so its gradient can only come from the output.
    assert!(grad[7 * 48..8 * 48].iter().any(|&g| g != 0.0));
}

#[test]
fn weights_depend_on_the_seed_only() {
    let weights = |seed| {
        let model = model::<Flex>(tiny(), seed);
        (values(model.layers[1].mlp.as_ref().unwrap().up_proj.weight.val()), values(model.embed_tokens.weight.val()))
    };
    assert_eq!(weights(7), weights(7));
    assert_ne!(weights(7).0, weights(8).0);
    // Experts are initialized like linears.
    let moe = model::<Flex>(tiny_moe(), 7).layers[1].moe.clone().unwrap();
    let [up, down, router] =
        [weights(7).0, values(moe.experts.down_proj.weight.val()), values(moe.router.weight.val())];
    for (weights, variance) in [(up, 1.0 / 48.0 / 4.0), (down, 1.0 / 80.0 / 4.0), (router, 1.0 / 48.0)] {
        let std = (weights.iter().map(|w| w * w).sum::<f32>() / weights.len() as f32).sqrt();
        let expected = f32::sqrt(variance);
        assert!((std / expected - 1.0).abs() < 0.1, "{std} {expected}");
    }
}

#[test]
fn counted_parameters_are_those_of_the_module_and_as_published() {
    for config in [tiny(), tiny_with(|dims| dims.tie_word_embeddings = true), tiny_moe()] {
        let module = Decoder::<Flex>::new(config, &Default::default()).unwrap();
        assert_eq!(module.num_params(), config.dims.num_params());
    }
    for (name, params) in [
        ("llama3-1b", 1_235_814_400),
        ("llama3-3b", 3_212_749_824),
        ("llama3-8b", 8_030_261_248),
        ("llama3-70b", 70_553_706_496),
        ("llama3-405b", 405_853_388_800),
    ] {
        assert_eq!(DecoderConfig::preset(name).unwrap().dims.num_params(), params, "{name}");
    }
    for name in presets() {
        DecoderConfig::preset(&name).unwrap().validate().unwrap();
    }
}
