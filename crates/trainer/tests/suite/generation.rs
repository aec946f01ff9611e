//! Generation: greedy against the full forward pass, batches against single prompts, caches, seeds,
//! temperature, errors.

use std::num::NonZero;

use burn::backend::Flex;
use burn::module::{AutodiffModule, Param};
use burn::tensor::Tensor;
use burn::tensor::backend::Backend;
use burn_float8::report::independent_rows;
use burn_float8::{Float8, Float8Config, Recipe};
use models::{Decoder, DecoderConfig};
use trainer::config::ConfigError;
use trainer::{
    Batching, CacheDtype, CacheOptions, CausalLm, CausalLmExt, Filters, GenerateOptions, KeyValueCache, Sampling,
    rng::Rng,
};

use crate::common::{Train, cause, ids, model, refuses, relative, tiny, tiny_moe, tiny_with, tokens, values};

#[test]
fn greedy_is_the_argmax_of_the_full_forward_pass() {
    let model = model::<Flex>(tiny(), 1);
    let prompt = [5, 17, 200];
    let generated = model.generate(&prompt, 12, 288, &[], Sampling::Greedy).unwrap();
    let mut sequence: Vec<i32> = prompt.iter().map(|&token| token as i32).collect();
    for token in generated {
        let len = sequence.len();
        let logits = values(model.forward(ids(&sequence, [1, len])));
        let last = &logits[(len - 1) * 288..];
        let best = (0..288).max_by(|&a, &b| last[a].total_cmp(&last[b])).unwrap();
        assert_eq!(token as usize, best);
        sequence.push(best as i32);
    }
}

#[test]
fn seeds_repeat_and_a_low_temperature_is_greedy() {
    let model = model::<Flex>(tiny(), 2);
    let draw =
        |temperature, seed| model.generate(&[1, 2], 30, 288, &[], Sampling::Temperature { temperature, seed }).unwrap();
    assert_eq!(draw(1.0, 3), draw(1.0, 3));
    assert_ne!(draw(1.0, 3), draw(1.0, 4));
    assert_eq!(draw(1e-9, 3), model.generate(&[1, 2], 30, 288, &[], Sampling::Greedy).unwrap());
}

#[test]
fn only_the_choices_are_chosen() {
    let model = model::<Flex>(tiny(), 3);
    let sampling = Sampling::Temperature { temperature: 100.0, seed: 0 };
    let tokens = model.generate(&[287], 60, 4, &[], sampling).unwrap();
    assert!(tokens.iter().all(|&token| token < 4));
    assert!((0..4).all(|token| tokens.contains(&token)), "nearly uniform: {tokens:?}");
}

#[test]
fn a_stop_token_ends_it() {
    let model = model::<Flex>(tiny(), 3);
    let generate = |stop: &[u32]| model.generate(&[1, 2], 30, 288, stop, Sampling::Greedy).unwrap();
    let all = generate(&[]);
    // Not the first token, and one that does not occur earlier.
    let at = (1..30).find(|&i| !all[..i].contains(&all[i])).expect("more than one token");
    assert_eq!(generate(&[287, all[at]]), all[..at]);
}

#[test]
fn impossible_requests_are_refused() {
    let model = model::<Flex>(tiny(), 4);
    let generate = |prompt: &[u32], choices| model.generate(prompt, 1, choices, &[], Sampling::Greedy);
    assert!(matches!(cause(generate(&[], 288)), ConfigError::Value { key: "prompt", .. }));
    assert!(matches!(cause(generate(&[1], 0)), ConfigError::Value { key: "num_choices", .. }));
    for (prompt, choices) in [(288, 288), (1, 289)] {
        refuses(generate(&[prompt], choices), "vocab_size = 288, but there are tokens up to 288");
    }
    let options =
        GenerateOptions { filters: Filters { top_p: 0.0, ..Filters::default() }, ..GenerateOptions::new(1, 9) };
    let refused = model.generate_batch(&[vec![1]], &options);
    assert!(matches!(cause(refused), ConfigError::Value { key: "--top-p", .. }));
    // The model has 64 positions.
    let long = |len, new| model.generate_batch(&[vec![1, 2], vec![1; len]], &GenerateOptions::new(new, 288));
    assert!(long(60, 4).is_ok());
    refuses(long(61, 4), "the 61 tokens of prompt 2 and 4 new ones exceed the model's 64 positions");
    refuses(long(2, usize::MAX), "the 2 tokens of prompt 1 and ");
    let mut model = model;
    let norm = model.norm.gamma.val() * f32::NAN;
    model.norm.gamma = Param::from_tensor(norm);
    let broken = model.generate_batch(&[vec![1, 2], vec![3]], &GenerateOptions::new(3, 288));
    refuses(broken, "the logits of the token after prompt 1 are NaN or infinite");
}

/// Prompts of several lengths, one of them longer than the generated text.
fn prompts() -> Vec<Vec<u32>> {
    let mut rng = Rng::named(5, "prompts");
    [3, 17, 1, 9, 30].map(|len| (0..len).map(|_| rng.below(288) as u32).collect()).into()
}

fn options() -> GenerateOptions {
    let filters = Filters { repetition_penalty: 1.1, top_k: NonZero::new(60), top_p: 0.95, min_p: 0.01 };
    let sampling = Sampling::Temperature { temperature: 0.9, seed: 7 };
    GenerateOptions { sampling, filters, ..GenerateOptions::new(20, 288) }
}

/// FP8 model on the inner backend.
fn float8(config: DecoderConfig, recipe: Recipe) -> Decoder<Float8<Flex>> {
    let model = model::<Train>(config, 6);
    let output = model.lm_head.iter().map(|_| "lm_head");
    let (model, _) = Float8Config::new(recipe).with_filter_fqns(output).apply::<Train, _>(model).unwrap();
    model.valid()
}

#[test]
fn a_batch_is_each_prompt_alone_bit_for_bit() {
    /// Texts of batches of `rows` prompts against each prompt alone.
    fn check<B: Backend>(model: &Decoder<B>, rows: usize, what: &str) {
        let (prompts, options) = (prompts(), options());
        let batching = if rows == 1 { Batching::Alone } else { Batching::Exact(NonZero::new(rows).unwrap()) };
        let batch = GenerateOptions { batching, ..options.clone() };
        let batch = model.generate_batch(&prompts, &batch).unwrap();
        for (prompt, text) in prompts.iter().zip(&batch) {
            let alone = model.generate_batch(std::slice::from_ref(prompt), &options).unwrap();
            assert_eq!(alone[0], *text, "{what}");
            assert_eq!(text.len(), 20);
        }
    }
    let output = &["lm_head"][..];
    check(&model::<Flex>(tiny(), 6), 1, "f32");
    for recipe in Recipe::ALL {
        let model = float8(tiny(), recipe);
        // One scale for all rows of x, also for `delayed` without a history.
        let is_of_all = matches!(recipe, Recipe::Tensorwise | Recipe::Delayed);
        let rows = independent_rows(&model, output);
        assert_eq!(rows, if is_of_all { 1 } else { 4 }, "{recipe}");
        check(&model, rows, &recipe.to_string());
    }
    let tied = float8(tiny_with(|dims| dims.tie_word_embeddings = true), Recipe::Rowwise);
    check(&tied, independent_rows(&tied, &[]), "tied");
    let mixture = float8(tiny_moe(), Recipe::Rowwise);
    assert_eq!(independent_rows(&mixture, output), 1, "an expert may get the rows of all");
    check(&mixture, 1, "a mixture");
}

/// Calls `check` with the logits of each row in a batch of separately prefilled rows, and the row's
/// alone. Some rows end early.
fn rows_of_a_batch<B: Backend>(
    model: &Decoder<B>,
    count: usize,
    options: CacheOptions,
    check: &mut dyn FnMut(&[f32], &[f32]),
) {
    let read = |prompt: &Vec<u32>| {
        let mut cache = model.new_cache(&options);
        let tokens: Vec<i32> = prompt.iter().map(|token| *token as i32).collect();
        model.forward_cached(ids(&tokens, [1, tokens.len()]), &mut cache);
        cache
    };
    let mut alone: Vec<_> = prompts()[..count].iter().map(read).collect();
    let mut joined = KeyValueCache::join(alone.clone());
    let mut rows: Vec<usize> = (0..count).collect();
    for step in 0..8 {
        let next = tokens([rows.len(), 1], 288, step);
        let got = values(model.forward_cached(ids(&next, [rows.len(), 1]), &mut joined));
        for (i, row) in rows.iter().enumerate() {
            let want = values(model.forward_cached(ids(&next[i..][..1], [1, 1]), &mut alone[*row]));
            check(&got[i * 288..][..288], &want);
        }
        let left: &[usize] = match step {
            2 => &[count - 1, 0, 2],
            4 => &[1, 2],
            _ => continue,
        };
        joined.keep(left);
        rows = left.iter().map(|place| rows[*place]).collect();
    }
}

/// Without `rows_alone` some logits differ, so equal bits are not by chance.
#[test]
fn rows_of_a_batch_have_the_bits_of_each() {
    let mut others = 0;
    for (recipe, dtype) in [
        (Recipe::Rowwise, None),
        (Recipe::Rowwise, Some(CacheDtype::Bf16)),
        (Recipe::Blockwise, Some(CacheDtype::E4m3)),
        (Recipe::Mxfp8, Some(CacheDtype::F32)),
    ] {
        // Burn's GEMM of the table uses another order for one row.
        let model = float8(tiny_with(|dims| dims.tie_word_embeddings = true), recipe);
        for rows_alone in [true, false] {
            let options = CacheOptions { dtype, positions: 40, rows_alone };
            rows_of_a_batch(&model, 4, options, &mut |got, want| {
                assert!(got == want || !rows_alone, "{recipe} {dtype:?}");
                others += usize::from(got != want);
            });
        }
    }
    assert!(others > 0);
}

#[test]
fn rows_of_a_batch_are_as_far_as_each_is() {
    fn check<B: Backend>(model: &Decoder<B>, dtype: Option<CacheDtype>, what: &str) {
        for positions in [0, 40] {
            let options = CacheOptions { dtype, positions, rows_alone: false };
            rows_of_a_batch(model, 5, options, &mut |got, want| {
                assert!(relative(got, want) <= 1e-5, "{what} {dtype:?}: {:e}", relative(got, want));
            });
        }
    }
    for dtype in [None, Some(CacheDtype::F32), Some(CacheDtype::Bf16), Some(CacheDtype::E4m3)] {
        check(&model::<Flex>(tiny(), 7), dtype, "Flex");
        check(&model::<Train>(tiny(), 7).valid(), dtype, "Float8");
    }
    check(&model::<Flex>(tiny_moe(), 7), None, "a mixture");
}

/// Attention over padded batches gives the same bits as each row alone.
#[test]
fn a_batch_of_attention_is_exact() {
    use burn_float8::nn::{attention, attention_but};
    type B = Float8<Flex>;
    let options = burn::tensor::ops::AttentionModuleOptions { is_causal: true, ..Default::default() };
    for (keys, pad) in [(40, 7), (1100, 530), (600, 1), (513, 512)] {
        let random = |heads, len, seed| {
            let mut rng = Rng::named(seed, "attention");
            let values: Vec<f32> = (0..2 * heads * len * 8).map(|_| rng.truncated_normal(3.0) as f32).collect();
            Tensor::<B, 4>::from_data(burn::tensor::TensorData::new(values, [2, heads, len, 8]), &Default::default())
        };
        let (q, k, v) = (random(4, 1, 1), random(2, keys, 2), random(2, keys, 3));
        let hidden: Vec<bool> = (0..2 * keys).map(|i| i < pad).collect();
        let hidden = Tensor::from_data(burn::tensor::TensorData::new(hidden, [2, keys]), &Default::default());
        let got = values(attention_but(q.clone(), k.clone(), v.clone(), hidden, options));
        let row = |t: &Tensor<B, 4>, row: usize, from: usize| t.clone().slice_dim(0, row..row + 1).slice_dim(2, from..);
        let alone =
            |i: usize, from| values(attention(row(&q, i, 0), row(&k, i, from), row(&v, i, from), None, options));
        assert_eq!(got, [alone(0, pad), alone(1, 0)].concat(), "{keys} {pad}");
    }
}

#[test]
fn a_cache_that_grows_is_one_that_was_there() {
    let model = model::<Flex>(tiny(), 8);
    for cache in [None, Some(CacheDtype::Bf16), Some(CacheDtype::E4m3)] {
        let generate = |preallocate| {
            let options = GenerateOptions { preallocate, cache, ..GenerateOptions::new(40, 288) };
            model.generate_batch(&[vec![1, 2, 3]], &options).unwrap()
        };
        assert_eq!(generate(true), generate(false), "{cache:?}");
    }
}

#[test]
fn caches_of_fewer_bits_are_near() {
    let model = model::<Flex>(tiny(), 9);
    let tokens = tokens([1, 40], 288, 9);
    let logits = |dtype| {
        let mut cache = model.new_cache(&CacheOptions { dtype, positions: 0, rows_alone: false });
        values(model.forward_cached(ids(&tokens[..39], [1, 39]), &mut cache));
        values(model.forward_cached(ids(&tokens[39..], [1, 1]), &mut cache))
    };
    let exact = logits(None);
    assert_eq!(logits(Some(CacheDtype::F32)), exact);
    let [bf16, e4m3] = [CacheDtype::Bf16, CacheDtype::E4m3].map(|dtype| relative(&logits(Some(dtype)), &exact));
    assert!(bf16 > 0.0 && bf16 < 5e-3 && e4m3 > bf16 && e4m3 < 8e-2, "{bf16:e} {e4m3:e}");
}

#[test]
fn a_text_ends_where_it_is_told_to_and_the_others_go_on() {
    let model = model::<Flex>(tiny(), 10);
    for batching in [Batching::Alone, Batching::Exact(NonZero::new(2).unwrap()), Batching::All] {
        let options = GenerateOptions { batching, ..GenerateOptions::new(12, 288) };
        let all = model.generate_batch(&prompts(), &options).unwrap();
        let mut texts = vec![vec![]; all.len()];
        let ends = [1, 12, 4, 12, 7];
        model
            .generate_each(&prompts(), &options, |prompt, token| {
                texts[prompt].push(token);
                Ok(texts[prompt].len() < ends[prompt])
            })
            .unwrap();
        for ((text, all), end) in texts.iter().zip(&all).zip(ends) {
            assert_eq!(*text, all[..end], "{batching:?}");
        }
    }
}

#[test]
fn a_penalty_keeps_greedy_from_repeating() {
    let model = model::<Flex>(tiny(), 11);
    let distinct = |repetition_penalty| {
        let filters = Filters { repetition_penalty, ..Filters::default() };
        let options = GenerateOptions { filters, ..GenerateOptions::new(30, 288) };
        let mut text = model.generate_batch(&[vec![1, 2]], &options).unwrap().remove(0);
        text.sort_unstable();
        text.dedup();
        text.len()
    };
    assert_eq!(distinct(1e6), 30);
    assert!(distinct(1.0) < 30);
}
