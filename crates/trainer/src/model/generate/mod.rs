//! Text generation with a key-value cache. Each prompt is prefilled separately; then the batch is
//! decoded token by token.

mod options;
mod sampling;

use anyhow::{Context, Result, bail};
use burn::tensor::backend::Backend;
use burn::tensor::{Int, Tensor, TensorData};

pub use options::{Batching, CacheDtype, CacheOptions, Filters, GenerateOptions, KeyValueCache, Sampling};

use self::sampling::Sampler;
use super::{CausalLm, ModelConfig, ModelSize};
use crate::config::ConfigError;
use crate::error::device_failed;

/// Continues each prompt like [`CausalLmExt::generate_batch`](super::CausalLmExt::generate_batch).
/// `take` is called with the index of a prompt and its next token, and returns whether to continue.
/// After all texts of a batch have ended, it is called once per text without a token.
pub(crate) fn generate<B: Backend, M: CausalLm<B>>(
    model: &M,
    prompts: &[Vec<u32>],
    options: &GenerateOptions,
    take: &mut dyn FnMut(usize, Option<u32>) -> Result<bool>,
) -> Result<()> {
    options.validate()?;
    prompts.iter().enumerate().try_for_each(|(number, prompt)| check(model, number, prompt, options))?;
    let size = options.batching.size(prompts.len());
    for (group, prompts) in prompts.chunks(size).enumerate() {
        let numbered = (group * size..).zip(prompts);
        run(model, numbered.clone(), options, &mut |number, token| take(number, Some(token)))?;
        for (number, _) in numbered {
            take(number, None)?;
        }
    }
    Ok(())
}

/// Checks that the model can continue the prompt.
fn check<B: Backend, M: CausalLm<B>>(
    model: &M,
    number: usize,
    prompt: &[u32],
    options: &GenerateOptions,
) -> Result<()> {
    let ModelSize { vocab_size, max_seq_len, .. } = model.config().size();
    let &GenerateOptions { max_new_tokens, num_choices, .. } = options;
    if prompt.is_empty() || num_choices == 0 {
        let key = if prompt.is_empty() { "prompt" } else { "num_choices" };
        let (value, reason) = ("empty".into(), "there is nothing to go by".into());
        return Err(ConfigError::Value { key, value, reason }.into());
    }
    let needed = prompt.iter().map(|&token| token as usize + 1).fold(num_choices, usize::max);
    if needed > vocab_size {
        bail!("vocab_size = {vocab_size}, but there are tokens up to {}", needed - 1);
    }
    if prompt.len().saturating_add(max_new_tokens) > max_seq_len {
        bail!(
            "the {} tokens of prompt {} and {max_new_tokens} new ones exceed the model's {max_seq_len} positions",
            prompt.len(),
            number + 1
        );
    }
    Ok(())
}

/// State of a prompt.
struct Continuation {
    number: usize,
    sampler: Sampler,
    last: u32,
}

/// Continues some prompts as one batch.
fn run<'a, B: Backend, M: CausalLm<B>>(
    model: &M,
    prompts: impl Iterator<Item = (usize, &'a Vec<u32>)> + Clone,
    options: &GenerateOptions,
    take: &mut dyn FnMut(usize, u32) -> Result<bool>,
) -> Result<()> {
    if options.max_new_tokens == 0 {
        return Ok(());
    }
    let device = model.devices().remove(0);
    let forward = |tokens: Vec<u32>, rows: usize, cache: &mut M::Cache| {
        let shape = [rows, tokens.len() / rows];
        let tokens: Vec<i32> = tokens.into_iter().map(|token| token as i32).collect();
        let input_ids = Tensor::<B, 2, Int>::from_data(TensorData::new(tokens, shape), &device);
        let logits = model.forward_cached(input_ids, cache).try_into_data();
        Ok::<Vec<f32>, anyhow::Error>(logits.map_err(|error| device_failed("generating", &error))?.iter().collect())
    };
    let longest = prompts.clone().map(|(_, prompt)| prompt.len()).max().unwrap_or(0);
    let cache_options = CacheOptions {
        dtype: options.cache,
        positions: if options.preallocate { longest + options.max_new_tokens } else { 0 },
        rows_alone: matches!(options.batching, Batching::Exact(_)),
    };
    let (mut rows, mut caches) = (vec![], vec![]);
    // Each prompt is prefilled separately, so that a row's keys and values do not depend on the
    // others.
    for (number, prompt) in prompts {
        let mut cache = model.new_cache(&cache_options);
        let logits = forward(prompt.clone(), 1, &mut cache)?;
        let mut row = Continuation { number, sampler: Sampler::new(prompt, options), last: 0 };
        if row.next(&logits, options, take)? {
            rows.push(row);
            caches.push(cache);
        }
    }
    if rows.is_empty() {
        return Ok(());
    }
    let mut cache = if caches.len() == 1 { caches.remove(0) } else { M::Cache::join(caches) };
    for _ in 1..options.max_new_tokens {
        let logits = forward(rows.iter().map(|row| row.last).collect(), rows.len(), &mut cache)?;
        let vocab_size = logits.len() / rows.len();
        let mut going_on = vec![];
        for (i, row) in rows.iter_mut().enumerate() {
            if row.next(&logits[i * vocab_size..][..vocab_size], options, take)? {
                going_on.push(i);
            }
        }
        if going_on.is_empty() {
            break;
        }
        if going_on.len() < rows.len() {
            cache.keep(&going_on);
            let mut place = 0..;
            rows.retain(|_| going_on.contains(&place.next().expect("endless")));
        }
    }
    Ok(())
}

impl Continuation {
    /// Chooses a token by these logits and returns whether to continue.
    fn next(
        &mut self,
        logits: &[f32],
        options: &GenerateOptions,
        take: &mut dyn FnMut(usize, u32) -> Result<bool>,
    ) -> Result<bool> {
        self.last = self.sampler.choose(&logits[..options.num_choices]).with_context(|| {
            format!(
                "the logits of the token after prompt {} are NaN or infinite: weights, or a precision that overflows, are to blame; \
                 `float8 eval` and another --precision tell which",
                self.number + 1
            )
        })?;
        Ok(!options.stop.contains(&self.last) && take(self.number, self.last)?)
    }
}
