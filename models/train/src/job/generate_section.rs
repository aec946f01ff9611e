//! [`GenerateSection`]: how text is sampled, from a configuration or a checkpoint's `generation_config.json`.

use std::num::NonZero;
use std::path::Path;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use crate::JobError;
use crate::config::{ConfigError, require};
use crate::hf::{HfReader, object};
use crate::model::{CacheDtype, Filters, Sampling};

/// How Hugging Face generates with a model.
const FILE: &str = "generation_config.json";

/// Text that is sampled: at the end of a run, and by `generate`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct GenerateSection {
    /// Text that the sample continues.
    pub prompt: String,
    /// Tokens to add; 0 leaves the sample out.
    pub max_new_tokens: usize,
    /// How freely tokens are drawn: logits are divided by it; 0 always takes the likeliest token.
    pub temperature: f64,
    /// Draw out of so many of the likeliest tokens; 0 is all.
    pub top_k: usize,
    /// Draw out of the likeliest tokens whose probabilities together reach it; 1 is all.
    pub top_p: f64,
    /// Draw out of tokens at least this likely, relative to the likeliest; 0 is all.
    pub min_p: f64,
    /// What counts against tokens that the text has, the prompt included: positive logits are divided by it, others multiplied; 1 is nothing.
    pub repetition_penalty: f64,
    /// Variables of the chat template for prompts, a table that overrides `data.chat_template_kwargs`.
    #[serde(skip_serializing_if = "Map::is_empty", deserialize_with = "crate::config::variables")]
    pub chat_template_kwargs: Map<String, Value>,
    /// Texts that end the sample, of which they are no part.
    pub stop: Vec<String>,
    /// Dtype in which keys and values of attention are kept; e4m3 has a scale for each head of each position. If absent, that of hidden
    /// states.
    pub kv_cache: Option<CacheDtype>,
    /// Whether several prompts go through the model as one batch; if not, one after another, with the bits of each alone. If absent, they
    /// do so on GPUs, and on CPUs by four where linears in FP8 give the same bits then.
    pub together: Option<bool>,
}

impl Default for GenerateSection {
    fn default() -> Self {
        Self {
            prompt: "    pub fn new(".into(),
            max_new_tokens: 100,
            temperature: 0.7,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            repetition_penalty: 1.0,
            chat_template_kwargs: Map::new(),
            stop: vec![],
            kv_cache: None,
            together: None,
        }
    }
}

/// The keys of the file that are read.
const READ: [&str; 7] = ["do_sample", "max_new_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty"];

/// Beginnings of keys of the tokenizer.
const TOKENS: [&str; 3] = ["bos_", "eos_", "pad_"];
/// Parts of keys of speed, and of the form of results. Like the tokenizer's, they choose no token.
const OTHERS: [&str; 7] = ["cache", "assistant", "lookbehind", "return_", "output_", "_version", "_from_model"];

impl GenerateSection {
    /// Takes the settings of `generation_config.json` in a checkpoint's folder, if it has one.
    /// Missing keys have Hugging Face's defaults: tokens are drawn only with `do_sample`.
    ///
    /// The note names keys that would change the text and are not implemented.
    ///
    /// # Errors
    /// [`JobError::Io`], [`JobError::Json`], [`JobError::HfUnsupported`] for a value that cannot be.
    pub fn with_file_of(self, folder: &Path) -> Result<(Self, Option<String>), JobError> {
        let path = folder.join(FILE);
        if !path.exists() {
            return Ok((self, None));
        }
        let map = object(&path)?;
        let file = HfReader::new(&path, &map);
        let draws = file.boolean("do_sample")?.unwrap_or(false);
        let is_all = file.get("top_k").and_then(Value::as_i64) == Some(-1);
        let section = Self {
            max_new_tokens: file.integer("max_new_tokens")?.unwrap_or(self.max_new_tokens),
            temperature: if draws { file.number("temperature")?.unwrap_or(1.0) } else { 0.0 },
            top_k: if is_all { 0 } else { file.integer("top_k")?.unwrap_or(50) },
            top_p: file.number("top_p")?.unwrap_or(1.0),
            min_p: file.number("min_p")?.unwrap_or(0.0),
            repetition_penalty: file.number("repetition_penalty")?.unwrap_or(1.0),
            ..self
        };
        section.validate().map_err(|error| match error {
            ConfigError::Value { key, reason, .. } => file.unsupported(key.trim_start_matches("generate."), &reason),
            error => error.into(),
        })?;
        // Factors and exponents of 1.0 change nothing, nor does one beam.
        let is_one = |key: &str| map[key] == json!(1.0) || key.starts_with("num_") && map[key] == json!(1);
        let is_none = |key: &str| map[key].as_f64() == Some(0.0) || is_one(key);
        let is_done = |key: &str| {
            TOKENS.iter().any(|begin| key.starts_with(begin))
                || OTHERS.iter().any(|part| key.contains(part))
                || is_none(key)
        };
        let mut ignored: Vec<_> = file.others(&READ).filter(|key| !is_done(key)).collect();
        ignored.sort_unstable();
        let note = format!("{}: ignored, as it is not done here: {}", path.display(), ignored.join(", "));
        Ok((section, Some(note).filter(|_| !ignored.is_empty())))
    }

    /// Checks what the types do not.
    ///
    /// # Errors
    /// [`ConfigError::Value`] naming the first key that cannot be.
    pub fn validate(&self) -> Result<(), ConfigError> {
        let Self { prompt, temperature, stop, .. } = self;
        let fits = *temperature >= 0.0 && temperature.is_finite();
        require("generate.temperature", temperature, fits, "must be finite and not negative")?;
        self.filters().validate()?;
        let has_empty = stop.iter().any(String::is_empty);
        require("generate.stop", format!("{stop:?}"), !has_empty, "an empty text ends everything")?;
        require("generate.prompt", format!("{prompt:?}"), !prompt.is_empty(), "must not be empty")
    }

    /// Which tokens may be chosen.
    pub fn filters(&self) -> Filters {
        let Self { top_k, top_p, min_p, repetition_penalty, .. } = *self;
        Filters { repetition_penalty, top_k: NonZero::new(top_k), top_p, min_p }
    }

    /// How they are chosen.
    pub fn sampling(&self, seed: u64) -> Sampling {
        match self.temperature {
            0.0 => Sampling::Greedy,
            temperature => Sampling::Temperature { temperature, seed },
        }
    }
}
