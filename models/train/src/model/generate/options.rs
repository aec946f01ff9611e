//! [`GenerateOptions`]: how text is generated, and [`KeyValueCache`], what a model's cache has to be able to do.

use std::num::NonZero;

use clap::ValueEnum;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::config::{ConfigError, require};

/// How to choose the next token.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Sampling {
    /// The likeliest token; the first of several.
    Greedy,
    /// A token drawn from `softmax(logits / temperature)`.
    Temperature {
        /// Above 0; 1 is the model's own distribution.
        temperature: f64,
        /// Decides what is drawn.
        seed: u64,
    },
}

/// Which tokens may be chosen, and what counts against them. As in Hugging Face's `generate`, and in its order: the penalty, then the
/// temperature, then each of the others out of what is left.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Filters {
    /// Logits of tokens that the text has, prompt included, are divided by it if they are positive, and multiplied if not; 1 is none
    /// (arXiv 1909.05858).
    pub repetition_penalty: f64,
    /// So many of the likeliest tokens, and what is as likely as the last of them.
    pub top_k: Option<NonZero<usize>>,
    /// The likeliest tokens whose probabilities together reach it; 1 is all (arXiv 1904.09751).
    pub top_p: f64,
    /// Tokens at least this likely, relative to the likeliest; 0 is all (arXiv 2407.01082).
    pub min_p: f64,
}

impl Default for Filters {
    fn default() -> Self {
        Self { repetition_penalty: 1.0, top_k: None, top_p: 1.0, min_p: 0.0 }
    }
}

/// In which dtype keys and values are kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum CacheDtype {
    /// Four bytes an element.
    F32,
    /// Two bytes.
    Bf16,
    /// One byte, and a scale in f32 for each head of each position.
    E4m3,
}

/// How a cache keeps keys and values.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CacheOptions {
    /// In which dtype; that of hidden states if there is none.
    pub dtype: Option<CacheDtype>,
    /// Positions that there is room for from the beginning. A cache that has more of them doubles.
    pub positions: usize,
    /// Whether each row of a batch is to get the bits that it gets alone, as far as that is the model's: its output layer, which is mostly
    /// in high precision, then takes the rows one by one.
    pub rows_alone: bool,
}

/// Which prompts go through the model as one batch, after each has been read by itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Batching {
    /// None: one text after another is made, each bit for bit what it is alone.
    Alone,
    /// So many at a time, with the bits of each alone where all linears but the output layer give so many rows these bits
    /// ([`independent_rows`](burn_float8::report::independent_rows)): their weights are read once for all of them.
    Exact(NonZero<usize>),
    /// 64 prompts at a time. Each text differs from the prompt's text alone by rounding, and with
    /// per-tensor FP8 scales by the scales.
    All,
}

/// Prompts that have a key-value cache at once.
const TOGETHER: usize = 64;

impl Batching {
    /// How many of so many prompts are a batch.
    pub(crate) fn size(self, prompts: usize) -> usize {
        match self {
            Self::Alone => 1,
            Self::Exact(rows) => rows.get(),
            Self::All => prompts.clamp(1, TOGETHER),
        }
    }
}

/// Keys and values of the positions that a model has seen.
pub trait KeyValueCache: Sized {
    /// Caches of one row each as one cache of all of them, whose rows may differ in length.
    fn join(rows: Vec<Self>) -> Self;

    /// Keeps these rows alone, in this order.
    fn keep(&mut self, rows: &[usize]);
}

/// How text is generated.
#[derive(Clone, Debug, PartialEq)]
pub struct GenerateOptions {
    /// Tokens to add to each prompt.
    pub max_new_tokens: usize,
    /// Tokens from 0 on that may be chosen: the rest of the vocabulary may be padding.
    pub num_choices: usize,
    /// Tokens that end a text, of which they are no part.
    pub stop: Vec<u32>,
    /// Greedy, or drawn. Each prompt has the seed for itself: it is continued as it would be alone.
    pub sampling: Sampling,
    /// Which tokens may be chosen.
    pub filters: Filters,
    /// The dtype of keys and values; that of hidden states if there is none.
    pub cache: Option<CacheDtype>,
    /// Whether there is room for all tokens from the beginning; the cache doubles when it is full if not.
    pub preallocate: bool,
    /// Which prompts go through the model together.
    pub batching: Batching,
}

impl GenerateOptions {
    /// So many tokens out of the first `num_choices`, greedy, in a cache that there is room for, one prompt after another.
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

    /// Checks what the types do not.
    ///
    /// # Errors
    /// [`ConfigError::Value`] naming the first that cannot be.
    pub fn validate(&self) -> Result<(), ConfigError> {
        if let Sampling::Temperature { temperature, .. } = self.sampling {
            let fits = temperature > 0.0 && temperature.is_finite();
            require("generate.temperature", temperature, fits, "must be finite and above 0 where tokens are drawn")?;
        }
        self.filters.validate()
    }
}

impl Filters {
    /// Checks every field.
    ///
    /// # Errors
    /// [`ConfigError::Value`] naming the first that cannot be.
    pub fn validate(&self) -> Result<(), ConfigError> {
        let Self { repetition_penalty: penalty, top_p, min_p, .. } = *self;
        let fits = penalty > 0.0 && penalty.is_finite();
        require("generate.repetition_penalty", penalty, fits, "must be finite and above 0; 1 is none")?;
        require("generate.top_p", top_p, top_p > 0.0 && top_p <= 1.0, "must be in (0, 1]; 1 is all tokens")?;
        require("generate.min_p", min_p, (0.0..=1.0).contains(&min_p), "must be in [0, 1]; 0 is all tokens")
    }
}
