//! [`GenerateSection`]: sampling settings, from a configuration or a checkpoint's
//! `generation_config.json`.

use std::num::NonZero;
use std::path::Path;

use anyhow::Result;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::config::{ConfigError, require};
use crate::files::read_json;
use crate::hf::HfReader;
use crate::model::{CacheDtype, Filters, Sampling};

/// Hugging Face's generation settings of a model.
const FILE: &str = "generation_config.json";

/// Text at the end of a run and by `generate`, which has flags for further settings.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct GenerateSection {
    /// Prompt.
    pub prompt: String,
    /// Number of new tokens; 0 disables the sample.
    pub max_new_tokens: usize,
    /// Sampling temperature: logits are divided by it. 0 always takes the most likely token.
    #[serde(skip)]
    pub temperature: f64,
    /// Tokens among which one is drawn.
    #[serde(skip)]
    pub filters: Filters,
    /// Texts that end the sample. They are not part of it.
    #[serde(skip)]
    pub stop: Vec<String>,
    /// Dtype of the cache of attention keys and values. e4m3 has one scale per head and position.
    /// If absent, the dtype of hidden states.
    #[serde(skip)]
    pub kv_cache: Option<CacheDtype>,
}

impl Default for GenerateSection {
    fn default() -> Self {
        Self {
            prompt: "    pub fn new(".into(),
            max_new_tokens: 100,
            temperature: 0.7,
            filters: Filters::default(),
            stop: vec![],
            kv_cache: None,
        }
    }
}

/// Keys of the file that are used.
const READ: [&str; 7] = ["do_sample", "max_new_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty"];

/// Prefixes of tokenizer keys.
const TOKENS: [&str; 3] = ["bos_", "eos_", "pad_"];
/// Parts of keys about speed or output format. Like the tokenizer's keys, they do not affect the
/// choice of tokens.
const OTHERS: [&str; 7] = ["cache", "assistant", "lookbehind", "return_", "output_", "_version", "_from_model"];

impl GenerateSection {
    /// Applies the settings of `generation_config.json` in a checkpoint's folder, if it exists.
    /// Missing keys have Hugging Face's defaults: without `do_sample`, decoding is greedy.
    ///
    /// The note lists keys that would change the text and are not implemented.
    ///
    /// # Errors
    /// A file that cannot be read; an invalid value.
    pub fn with_file_of(self, folder: &Path) -> Result<(Self, Option<String>)> {
        let path = folder.join(FILE);
        if !path.exists() {
            return Ok((self, None));
        }
        let map = read_json(&path)?;
        let file = HfReader::new(&path, &map);
        let draws = file.boolean("do_sample")?.unwrap_or(false);
        let is_all = file.get("top_k").and_then(Value::as_i64) == Some(-1);
        let section = Self {
            max_new_tokens: file.integer("max_new_tokens")?.unwrap_or(self.max_new_tokens),
            temperature: if draws { file.number("temperature")?.unwrap_or(1.0) } else { 0.0 },
            filters: Filters {
                top_k: NonZero::new(if is_all { 0 } else { file.integer("top_k")?.unwrap_or(50) }),
                top_p: file.number("top_p")?.unwrap_or(1.0),
                min_p: file.number("min_p")?.unwrap_or(0.0),
                repetition_penalty: file.number("repetition_penalty")?.unwrap_or(1.0),
            },
            ..self
        };
        section.validate().map_err(|error| match error {
            ConfigError::Value { key, reason, .. } => file
                .unsupported(&key.trim_start_matches("generate.").trim_start_matches("--").replace('-', "_"), &reason),
            error => error.into(),
        })?;
        // Factors and exponents of 1.0 have no effect, nor does a single beam.
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

    /// Checks beyond the types.
    ///
    /// # Errors
    /// [`ConfigError::Value`] naming the first invalid key.
    pub fn validate(&self) -> Result<(), ConfigError> {
        let Self { prompt, temperature, stop, .. } = self;
        let fits = *temperature >= 0.0 && temperature.is_finite();
        require("--temperature", temperature, fits, "must be finite and not negative")?;
        self.filters.validate()?;
        let has_empty = stop.iter().any(String::is_empty);
        require("--stop", format!("{stop:?}"), !has_empty, "an empty text ends everything")?;
        require("generate.prompt", format!("{prompt:?}"), !prompt.is_empty(), "must not be empty")
    }

    /// Greedy or random choice of tokens.
    pub fn sampling(&self, seed: u64) -> Sampling {
        match self.temperature {
            0.0 => Sampling::Greedy,
            temperature => Sampling::Temperature { temperature, seed },
        }
    }
}
