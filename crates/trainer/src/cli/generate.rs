//! The command line of `generate`.

use anyhow::Context;
use std::hash::{BuildHasher, Hasher, RandomState};
use std::io::{self, Write};
use std::num::NonZero;
use std::path::PathBuf;

use clap::Parser;

use super::{ModelArgs, PrecisionArgs};
use crate::config::ConfigError;
use crate::files;
use crate::job::{Job, RunConfig, Task};
use crate::model::{CacheDtype, TrainableModel};

/// Prompts and sampling settings.
#[derive(Clone, Debug, Parser)]
pub struct GenerateArgs {
    /// The model.
    #[command(flatten)]
    pub model: ModelArgs,
    /// Text to continue, instead of generate.prompt; repeatable.
    #[arg(long, value_name = "TEXT")]
    pub prompt: Vec<String>,
    /// File with a text to continue on each line, added after --prompt.
    #[arg(long, value_name = "FILE")]
    pub prompts: Option<PathBuf>,
    /// Treat the text as a user's message in the model's chat template, and print the answer.
    #[arg(long)]
    pub chat: bool,
    /// Maximum number of new tokens, instead of generate.max_new_tokens; 100 unless set by the run
    /// or generation_config.json.
    #[arg(long, value_name = "N")]
    pub max_new_tokens: Option<usize>,
    /// Sampling temperature; 0 is greedy. If absent, as in generation_config.json, else 0.7.
    #[arg(long, value_name = "T")]
    pub temperature: Option<f64>,
    /// Sample from the K most likely tokens; 0 means all. If absent, as in generation_config.json.
    #[arg(long, value_name = "K")]
    pub top_k: Option<usize>,
    /// Sample from the most likely tokens whose probabilities sum to P; 1 means all. If absent, as
    /// in generation_config.json.
    #[arg(long, value_name = "P")]
    pub top_p: Option<f64>,
    /// Sample from tokens whose probability relative to the most likely one is at least P; 0 means
    /// all. If absent, as in generation_config.json.
    #[arg(long, value_name = "P")]
    pub min_p: Option<f64>,
    /// Penalty for tokens already in the text; 1 disables it. If absent, as in
    /// generation_config.json.
    #[arg(long, value_name = "R")]
    pub repetition_penalty: Option<f64>,
    /// Text that ends the output and is not part of it; repeatable.
    #[arg(long, value_name = "TEXT")]
    pub stop: Vec<String>,
    /// Dtype of the cache of keys and values. If absent, the dtype of hidden states.
    #[arg(long, value_enum, value_name = "DTYPE")]
    pub kv_cache: Option<CacheDtype>,
    /// Seed of the samples. If absent, each call draws a new one.
    #[arg(long, value_name = "N")]
    pub seed: Option<u64>,
    /// Precision.
    #[command(flatten)]
    pub precision: PrecisionArgs,
}

impl GenerateArgs {
    pub(super) fn job<A: TrainableModel>(&self) -> anyhow::Result<Job<A>> {
        let (mut config, mut start) = self.model.open_with::<A::Section>(|folder, config| {
            let Some(folder) = folder else { return Ok(config) };
            let (generate, ignored) = config.generate.clone().with_file_of(folder)?;
            // stdout has only the texts.
            ignored.map_or(Ok(()), |note| writeln!(io::stderr(), "{note}"))?;
            Ok(RunConfig { generate, ..config })
        })?;
        self.precision.apply(&mut config, &mut start);
        let is_set = self.model.settings().iter().any(|setting| setting.is_of(&["training.seed"]));
        let RunConfig { generate, training, .. } = &mut config;
        generate.max_new_tokens = self.max_new_tokens.unwrap_or(generate.max_new_tokens);
        generate.temperature = self.temperature.unwrap_or(generate.temperature);
        let filters = &mut generate.filters;
        filters.top_k = self.top_k.map_or(filters.top_k, NonZero::new);
        filters.top_p = self.top_p.unwrap_or(filters.top_p);
        filters.min_p = self.min_p.unwrap_or(filters.min_p);
        filters.repetition_penalty = self.repetition_penalty.unwrap_or(filters.repetition_penalty);
        generate.kv_cache = self.kv_cache.or(generate.kv_cache);
        if !self.stop.is_empty() {
            generate.stop.clone_from(&self.stop);
        }
        training.seed = match self.seed {
            Some(seed) => seed,
            None if is_set => training.seed,
            // The run's seed belongs to its weights and batches. With it, every call would sample
            // the same text.
            None => RandomState::new().build_hasher().finish() >> 1,
        };
        Ok(Job { config, start, task: Task::Generate { prompts: self.texts()?, is_chat: self.chat } })
    }

    /// Prompts of the command line.
    fn texts(&self) -> anyhow::Result<Vec<String>> {
        let mut prompts = self.prompt.clone();
        if let Some(path) = &self.prompts {
            let text = files::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
            // Removes the byte order mark that some editors write.
            let text = text.strip_prefix('\u{feff}').unwrap_or(&text);
            prompts.extend(text.lines().map(String::from));
            let empty = text.lines().position(str::is_empty).map(|line| format!("line {} is empty", line + 1));
            let empty = if text.is_empty() { Some("has no line".into()) } else { empty };
            if let Some(what) = empty {
                let (value, reason) = (path.display().to_string(), format!("{what}: each is a text to continue"));
                return Err(ConfigError::Value { key: "--prompts", value, reason }.into());
            }
        }
        if let Some(number) = prompts.iter().position(String::is_empty) {
            let (value, reason) = ("\"\"".into(), format!("text {} must not be empty", number + 1));
            return Err(ConfigError::Value { key: "--prompt", value, reason }.into());
        }
        Ok(prompts)
    }
}
