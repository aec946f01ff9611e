//! [`GenerateOptions`]: options of text generation, and [`KeyValueCache`], the interface of a
//! model's cache.

use std::num::NonZero;

use clap::ValueEnum;

use crate::config::{ConfigError, require};

/// Choice of the next token.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Sampling {
    /// The most likely token; the first if several are equal.
    Greedy,
    /// A token drawn from `softmax(logits / temperature)`.
    Temperature {
        /// Above 0; 1 samples from the model's distribution.
        temperature: f64,
        /// Seed of the samples.
        seed: u64,
    },
}

/// Filters and penalties of candidate tokens, in the order of Hugging Face's `generate`: the
/// penalty, the temperature, then each filter on the remaining tokens.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Filters {
    /// Penalty for tokens in the text, including the prompt: positive logits are divided by it,
    /// others multiplied. 1 disables it (arXiv 1909.05858).
    pub repetition_penalty: f64,
    /// The k most likely tokens, and tokens as likely as the k-th.
    pub top_k: Option<NonZero<usize>>,
    /// The most likely tokens whose probabilities sum to this; 1 means all (arXiv 1904.09751).
    pub top_p: f64,
    /// Tokens whose probability relative to the most likely one is at least this; 0 means all
    /// (arXiv 2407.01082).
    pub min_p: f64,
}

impl Default for Filters {
    fn default() -> Self {
        Self { repetition_penalty: 1.0, top_k: None, top_p: 1.0, min_p: 0.0 }
    }
}

/// Dtype of cached keys and values.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum CacheDtype {
    /// Four bytes per element.
    F32,
    /// Two bytes per element.
    Bf16,
    /// One byte per element, and one f32 scale per head and position.
    E4m3,
}

/// Options of a key-value cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CacheOptions {
    /// Dtype; if `None`, the dtype of hidden states.
    pub dtype: Option<CacheDtype>,
    /// Initial capacity in positions. A full cache doubles.
    pub positions: usize,
    /// Whether each row of a batch must have the bits that it has alone, as far as the model can
    /// ensure it. The output layer, usually in high precision, then processes rows one by one.
    pub rows_alone: bool,
}

/// Prompts that are decoded as one batch after separate prefills.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Batching {
    /// One text after another, bit for bit as alone.
    Alone,
    /// Up to this number of prompts at a time. Each text is bitwise the same as alone, if linears
    /// compute this number of rows independently
    /// ([`independent_rows`](burn_float8::report::independent_rows)); the output layer need not.
    /// Weights are read once for the whole batch.
    Exact(NonZero<usize>),
    /// 64 prompts at a time. A text differs from the one generated alone by rounding, and with
    /// per-tensor FP8 scales by the scales.
    All,
}

/// Number of prompts with a key-value cache at once.
const TOGETHER: usize = 64;

impl Batching {
    /// Batch size for this number of prompts.
    pub(crate) fn size(self, prompts: usize) -> usize {
        match self {
            Self::Alone => 1,
            Self::Exact(rows) => rows.get(),
            Self::All => prompts.clamp(1, TOGETHER),
        }
    }
}

/// Keys and values of the positions seen by a model.
pub trait KeyValueCache: Sized {
    /// Joins caches of one row each. Rows may differ in length.
    fn join(rows: Vec<Self>) -> Self;

    /// Keeps only these rows, in this order.
    fn keep(&mut self, rows: &[usize]);
}

/// Options of text generation.
#[derive(Clone, Debug, PartialEq)]
pub struct GenerateOptions {
    /// New tokens per prompt.
    pub max_new_tokens: usize,
    /// Number of tokens, from 0 on, that may be chosen; the rest of the vocabulary may be padding.
    pub num_choices: usize,
    /// Tokens that end a text. They are not part of it.
    pub stop: Vec<u32>,
    /// Greedy or sampled. Each prompt uses the seed independently, so it continues as it would
    /// alone.
    pub sampling: Sampling,
    /// Filters of candidate tokens.
    pub filters: Filters,
    /// Dtype of cached keys and values; if `None`, the dtype of hidden states.
    pub cache: Option<CacheDtype>,
    /// Whether the cache is allocated for all tokens at once; otherwise it doubles when full.
    pub preallocate: bool,
    /// Prompts that are decoded together.
    pub batching: Batching,
}

impl GenerateOptions {
    /// Greedy generation from the first `num_choices` tokens, with a preallocated cache, one prompt
    /// after another.
    pub fn new(max_new_tokens: usize, num_choices: usize) -> Self {
        Self {
            max_new_tokens,
            num_choices,
            stop: vec![],
            sampling: Sampling::Greedy,
            filters: Filters::default(),
            cache: None,
            preallocate: true,
            batching: Batching::Alone,
        }
    }

    /// Checks beyond the types.
    ///
    /// # Errors
    /// [`ConfigError::Value`] naming the first invalid option.
    pub fn validate(&self) -> Result<(), ConfigError> {
        if let Sampling::Temperature { temperature, .. } = self.sampling {
            let fits = temperature > 0.0 && temperature.is_finite();
            require("--temperature", temperature, fits, "must be finite and above 0 where tokens are drawn")?;
        }
        self.filters.validate()
    }
}

impl Filters {
    /// Checks every field.
    ///
    /// # Errors
    /// [`ConfigError::Value`] naming the first invalid field.
    pub fn validate(&self) -> Result<(), ConfigError> {
        let Self { repetition_penalty: penalty, top_p, min_p, .. } = *self;
        let fits = penalty > 0.0 && penalty.is_finite();
        require("--repetition-penalty", penalty, fits, "must be finite and above 0; 1 is none")?;
        require("--top-p", top_p, top_p > 0.0 && top_p <= 1.0, "must be in (0, 1]; 1 is all tokens")?;
        require("--min-p", min_p, (0.0..=1.0).contains(&min_p), "must be in [0, 1]; 0 is all tokens")
    }
}
