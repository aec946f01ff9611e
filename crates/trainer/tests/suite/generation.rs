//! Generation: greedy against the full forward pass, batches against single prompts, caches, seeds,
//! temperature, errors.

use crate::common::*;

/// Tokens 1 and 2 continued by `new` ones.
fn continued(model: &Decoder<Flex>, new: usize, sampling: Sampling, filters: Filters, stop: &[u32]) -> Vec<u32> {
    let options = GenerateOptions { sampling, filters, stop: stop.to_vec(), ..GenerateOptions::new(new, 288) };
    model.generate_batch(&[vec![1, 2]], &options).unwrap().remove(0)
}

#[test]
fn seeds_repeat_and_a_low_temperature_is_greedy() {
    let model = model::<Flex>(tiny(), 2);
    let draw =
        |temperature, seed| continued(&model, 30, Sampling::Temperature { temperature, seed }, Filters::default(), &[]);
    assert_eq!(draw(1.0, 3), draw(1.0, 3));
    assert_ne!(draw(1.0, 3), draw(1.0, 4));
    let all = continued(&model, 30, Sampling::Greedy, Filters::default(), &[]);
    assert_eq!(draw(1e-9, 3), all);
    // A stop token ends it. Not the first token, and one that does not occur earlier.
    let at = (1..30).find(|&i| !all[..i].contains(&all[i])).expect("more than one token");
    assert_eq!(continued(&model, 30, Sampling::Greedy, Filters::default(), &[287, all[at]]), all[..at]);
    // A penalty keeps it from repeating.
    let distinct = |repetition_penalty| {
        let filters = Filters { repetition_penalty, ..Filters::default() };
        continued(&model, 30, Sampling::Greedy, filters, &[])
            .into_iter()
            .collect::<std::collections::BTreeSet<_>>()
            .len()
    };
    assert!(distinct(1e6) == 30 && distinct(1.0) < 30);
    // Only the choices are chosen, nearly uniformly.
    let sampling = Sampling::Temperature { temperature: 100.0, seed: 0 };
    let tokens = model.generate(&[287], 60, 4, &[], sampling).unwrap();
    assert!(tokens.iter().all(|&token| token < 4) && (0..4).all(|token| tokens.contains(&token)), "{tokens:?}");
}

#[test]
fn impossible_requests_are_refused() {
    let mut model = model::<Flex>(tiny(), 4);
    let plain = Filters::default();
    for (prompts, new, choices, filters, says) in [
        (vec![vec![]], 1, 288, plain, "prompt = "),
        (vec![vec![1]], 1, 0, plain, "num_choices = "),
        (vec![vec![288]], 1, 288, plain, "vocab_size = 288, but there are tokens up to 288"),
        (vec![vec![1]], 1, 289, plain, "vocab_size = 288, but there are tokens up to 288"),
        (vec![vec![1]], 1, 9, Filters { top_p: 0.0, ..plain }, "--top-p = 0"),
        (
            vec![vec![1, 2], vec![1; 61]],
            4,
            288,
            plain,
            "the 61 tokens of prompt 2 and 4 new ones exceed the model's 64",
        ),
        (vec![vec![1, 2]], usize::MAX, 288, plain, "the 2 tokens of prompt 1 and "),
    ] {
        refuses(
            model.generate_batch(&prompts, &GenerateOptions { filters, ..GenerateOptions::new(new, choices) }),
            says,
        );
    }
    assert!(model.generate_batch(&[vec![1, 2], vec![1; 60]], &GenerateOptions::new(4, 288)).is_ok());
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

/// With `rows_alone` the bits are equal. Without, some logits differ, so equal bits are not by chance.
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
            rows_of_a_batch(&model, 4, CacheOptions { dtype, positions: 40, rows_alone }, &mut |got, want| {
                assert!(got == want || !rows_alone, "{recipe} {dtype:?}");
                others += usize::from(got != want);
            });
        }
    }
    assert!(others > 0);
    let dtypes = [None, Some(CacheDtype::F32), Some(CacheDtype::Bf16), Some(CacheDtype::E4m3)];
    let near = |got: &[f32], want: &[f32]| assert!(relative(got, want) <= 1e-5, "{:e}", relative(got, want));
    for (dtype, positions) in dtypes.into_iter().flat_map(|dtype| [(dtype, 0), (dtype, 40)]) {
        let options = CacheOptions { dtype, positions, rows_alone: false };
        rows_of_a_batch(&model::<Flex>(tiny(), 7), 5, options, &mut { near });
        rows_of_a_batch(&model::<Train>(tiny(), 7).valid(), 5, options, &mut { near });
    }
    let options = CacheOptions { dtype: None, positions: 40, rows_alone: false };
    rows_of_a_batch(&model::<Flex>(tiny_moe(), 7), 5, options, &mut { near });
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

/// Attention over padded batches gives the same bits as each row alone.
#[test]
fn a_batch_of_attention_is_exact() {
    use burn_float8::nn::{attention, attention_but};
    type B = Float8<Flex>;
    let options = burn::tensor::ops::AttentionModuleOptions { is_causal: true, ..Default::default() };
    let random = |heads, len, seed| {
        let mut rng = Rng::named(seed, "attention");
        let values: Vec<f32> = (0..2 * heads * len * 8).map(|_| rng.truncated_normal(3.0) as f32).collect();
        Tensor::<B, 4>::from_data(TensorData::new(values, [2, heads, len, 8]), &Default::default())
    };
    for (keys, pad) in [(40, 7), (1100, 530), (600, 1), (513, 512)] {
        let (q, k, v) = (random(4, 1, 1), random(2, keys, 2), random(2, keys, 3));
        let hidden: Vec<bool> = (0..2 * keys).map(|i| i < pad).collect();
        let hidden = Tensor::from_data(TensorData::new(hidden, [2, keys]), &Default::default());
        let got = values(attention_but(q.clone(), k.clone(), v.clone(), hidden, options));
        let alone = |row: usize, from: usize| {
            let [q, k, v] = [&q, &k, &v].map(|t| t.clone().slice_dim(0, row..row + 1));
            values(attention(q, k.slice_dim(2, from..), v.slice_dim(2, from..), None, options))
        };
        assert_eq!(got, [alone(0, pad), alone(1, 0)].concat(), "{keys} {pad}");
    }
}
