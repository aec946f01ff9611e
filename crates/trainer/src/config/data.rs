//! The section `[data]`: its checks, and how it is opened.

use std::fs;
use std::path::PathBuf;

use anyhow::{Context, Result};
use schemars::JsonSchema;
use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::{Map, Value};

use super::{ConfigError, require};
use crate::data::{DataSource, Dataset, Format, Packing, Validation, check_source};
use crate::progress::Progress;
use crate::{ChatTemplate, Tokenizer};

/// Training data.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct DataSection {
    /// Files and folders. Folders are searched recursively; links are followed, hidden files are
    /// skipped. If a folder has files in a data format, plain text other than `.txt` is skipped
    /// too; with `format`, all files are read. If both `paths` and `sources` are empty, the Rust
    /// sources of the local Cargo registry are read.
    pub paths: Vec<PathBuf>,
    /// Format of the files. If absent, it follows from the extension: `.jsonl` and `.ndjson`,
    /// `.json` for an array of objects or JSON Lines, `.parquet`, `.bin`. Text and JSON may be
    /// compressed by gzip or zstd: `.jsonl.zst`. `.csv`, `.tsv`, other JSON and other compressed
    /// files are refused, and skipped in folders. Other files are text, unless they begin like
    /// Parquet or, without an extension, like JSON Lines.
    pub format: Option<Format>,
    /// Field or column with the text in JSON, JSON Lines and Parquet. Where it is missing, the
    /// conversation in `messages` is read.
    pub field: String,
    /// Maximum bytes to read. If there are more, evenly spaced files are selected. If absent,
    /// everything is read, except for the Cargo registry: 4,000,000 bytes.
    pub max_bytes: Option<u64>,
    /// Several sources, each a table. Replaces `paths`, `format`, `field` and `max_bytes`.
    pub sources: Vec<DataSource>,
    /// How documents are packed into sequences. If absent, `whole` for conversations and `wrapped`
    /// otherwise.
    pub packing: Option<Packing>,
    /// Fraction of the tokens held out for the validation loss. 0 disables this loss. Ignored if
    /// `validation` is set: then nothing is held out.
    pub validation_split: f64,
    /// Files and folders for the validation loss, instead of a fraction of the training data. They
    /// are read with `format` and `field`.
    pub validation: Vec<PathBuf>,
    /// Folder of a Hugging Face checkpoint, a `tokenizer.json`, a `tokenizer.model`, or `bytes`,
    /// which maps each byte to a token. If absent, the tokenizer in `model.hf_path`, and `bytes`
    /// for a preset.
    pub tokenizer: Option<String>,
    /// Jinja chat template that renders `messages` as text. If absent, the template in the
    /// tokenizer's folder.
    pub chat_template: Option<PathBuf>,
    /// Variables of the chat template as a table: `{ enable_thinking = false }`. A row's own
    /// `chat_template_kwargs` and `enable_thinking` override them.
    #[serde(skip_serializing_if = "Map::is_empty", deserialize_with = "variables")]
    pub chat_template_kwargs: Map<String, Value>,
    /// Folder of the token cache, which later runs reuse. If absent, `burn-float8/tokens` in the
    /// user's cache folder, `$XDG_CACHE_HOME` or `~/.cache`.
    pub cache: Option<PathBuf>,
}

/// Deserializes a table of JSON values. Dates, inf and nan are errors: JSON has no dates and turns
/// inf and nan into null.
///
/// # Errors
/// Such a value, and anything but a table.
pub fn variables<'de, D: Deserializer<'de>>(table: D) -> Result<Map<String, Value>, D::Error> {
    let table = Map::deserialize(table)?;
    fn is_finite(value: &Value) -> bool {
        match value {
            Value::Null => false,
            Value::Array(values) => values.iter().all(is_finite),
            Value::Object(values) => values.values().all(is_finite),
            _ => true,
        }
    }
    if table.keys().any(|key| key.starts_with("$__toml_private")) {
        return Err(D::Error::custom("expected a table, found a date"));
    }
    match table.iter().find(|(_, value)| !is_finite(value)) {
        Some((key, _)) => Err(D::Error::custom(format!("`{key}` has inf or nan, which JSON cannot have"))),
        None => Ok(table),
    }
}

impl Default for DataSection {
    fn default() -> Self {
        Self {
            paths: vec![],
            format: None,
            field: "text".into(),
            max_bytes: None,
            sources: vec![],
            packing: None,
            validation_split: 0.05,
            validation: vec![],
            tokenizer: None,
            chat_template: None,
            chat_template_kwargs: Map::new(),
            cache: None,
        }
    }
}

impl DataSection {
    /// Bytes read from the Cargo registry by default.
    const REGISTRY_BYTES: u64 = 4_000_000;

    /// Checks beyond the types.
    ///
    /// # Errors
    /// [`ConfigError::Value`] naming the first invalid key.
    pub fn validate(&self) -> Result<(), ConfigError> {
        if let Some(max_bytes) = self.max_bytes {
            require("data.max_bytes", max_bytes, max_bytes >= 1, "must be at least 1")?;
        }
        let held_out = self.validation_split;
        require("data.validation_split", held_out, (0.0..1.0).contains(&held_out), "must be in [0, 1)")?;
        let default = Self::default();
        let is_alone =
            self.paths.is_empty() && self.format.is_none() && self.field == default.field && self.max_bytes.is_none();
        let reason = "each source has its own paths, format, field and max_bytes: remove those of [data]";
        require("data.sources", format!("{} sources", self.sources.len()), self.sources.is_empty() || is_alone, reason)
    }

    /// Replaces the paths and sources, unless `paths` is empty.
    pub fn replace_paths(&mut self, paths: &[PathBuf]) {
        if !paths.is_empty() {
            self.paths = paths.to_vec();
            self.sources.clear();
        }
    }

    /// Whether neither paths nor sources are configured.
    pub fn is_default(&self) -> bool {
        self.paths.is_empty() && self.sources.is_empty()
    }

    /// Data sources; by default the Cargo registry.
    pub fn sources(&self) -> Vec<DataSource> {
        if !self.sources.is_empty() {
            return self.sources.clone();
        }
        let Self { paths, format, field, max_bytes, .. } = self.clone();
        let source = DataSource { paths, format, field, max_bytes, ..DataSource::default() };
        if !self.is_default() {
            return vec![source];
        }
        let cargo_home = std::env::var_os("CARGO_HOME")
            .map_or_else(|| std::env::home_dir().unwrap_or_default().join(".cargo"), PathBuf::from);
        vec![DataSource {
            paths: vec![cargo_home.join("registry").join("src")],
            extension: Some("rs".into()),
            max_bytes: max_bytes.or(Some(Self::REGISTRY_BYTES)),
            ..source
        }]
    }

    /// Folder of the token cache.
    pub fn cache(&self) -> PathBuf {
        self.cache.clone().unwrap_or_else(|| {
            let set = std::env::var_os("XDG_CACHE_HOME").filter(|path| !path.is_empty()).map(PathBuf::from);
            let default = || std::env::home_dir().map(|home| home.join(".cache"));
            let user = set.or_else(default).unwrap_or_else(std::env::temp_dir);
            user.join("burn-float8").join("tokens")
        })
    }

    /// Checks what can be known of the data before it is read.
    ///
    /// # Errors
    /// The errors of [`check_source`].
    pub fn check(&self, tokenizer: &Tokenizer, template: Option<&ChatTemplate>) -> Result<()> {
        let sources = if self.is_default() { vec![] } else { self.sources() };
        let validation = self.like(&self.validation);
        sources.iter().chain([&validation]).try_for_each(|source| check_source(source, tokenizer, template))
    }

    /// Opens the data set.
    ///
    /// # Errors
    /// The errors of [`Dataset::open`]; a Cargo registry without sources.
    pub fn open(
        &self,
        tokenizer: &Tokenizer,
        template: Option<&ChatTemplate>,
        progress: &mut dyn FnMut(Progress),
    ) -> Result<Dataset> {
        let validation = [self.like(&self.validation)];
        let validation = match self.validation.is_empty() {
            true => Validation::Fraction(self.validation_split),
            false => Validation::Sources(&validation),
        };
        let sources = self.sources();
        if self.is_default() {
            fs::metadata(&sources[0].paths[0])
                .context("no Rust sources in the local Cargo registry: give text to train on with --data PATH")?;
        }
        Dataset::open(&sources, validation, tokenizer, template, &self.cache(), progress)
    }

    /// Opens other files as a validation-only data set.
    ///
    /// # Errors
    /// The errors of [`Dataset::open`].
    pub fn open_validation(
        &self,
        paths: &[PathBuf],
        tokenizer: &Tokenizer,
        template: Option<&ChatTemplate>,
        progress: &mut dyn FnMut(Progress),
    ) -> Result<Dataset> {
        let sources = [self.like(paths)];
        Dataset::open(&[], Validation::Sources(&sources), tokenizer, template, &self.cache(), progress)
    }

    /// Source of these files with this section's `format` and `field`.
    fn like(&self, paths: &[PathBuf]) -> DataSource {
        DataSource { format: self.format, field: self.field.clone(), ..DataSource::new(paths) }
    }
}
