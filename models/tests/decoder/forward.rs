//! The forward pass: causality, caching, head sharing, tied output, initial weights.

use burn::backend::{Autodiff, Flex};
use burn::module::Module;
use models::KvCache;
use models::presets;
use models::{Decoder, DecoderConfig};
use trainer::CacheOptions;
use trainer::ModelConfig;

use crate::common::{ids, model, relative, tiny, tiny_moe, tiny_with, tokens, values};

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
fn sequences_beyond_the_tables_work() {
    let short = model::<Flex>(tiny_with(|dims| dims.max_seq_len = 4), 4);
    let long = model::<Flex>(tiny(), 4);
    let tokens = tokens([1, 11], 288, 4);
    let [a, b] = [short, long].map(|model| values(model.forward(ids(&tokens, [1, 11]))));
    assert_eq!(a, b);
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
