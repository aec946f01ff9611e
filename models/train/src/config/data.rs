//! The section `[data]`: what its types do not check, and how it is opened.

use std::path::PathBuf;

use schemars::JsonSchema;
use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::{Map, Value};

use super::{ConfigError, require};
use crate::data::{DataError, DataSource, Dataset, Format, Packing, Validation};
use crate::progress::Progress;
use crate::{ChatTemplate, Tokenizer};

/// What is trained on.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct DataSection {
    /// Files, and folders that are searched recursively. Links are followed, hidden files left out, and where there are files in a
    /// format of data, text that is not `.txt` too; `format` takes all. If there are neither these nor `sources`, the Rust sources of the local
    /// Cargo registry.
    pub paths: Vec<PathBuf>,
    /// How files are read. If absent, their extensions decide: `.jsonl` and `.ndjson`, `.json` for an array of objects or lines of them,
    /// `.parquet`, `.bin`; `.csv`, `.tsv`, other JSON and what is compressed are refused, and left out of folders. All others are text,
    /// unless they begin as Parquet files do or, without an extension, as JSON Lines do.
    pub format: Option<Format>,
    /// The field or column of JSON, JSON Lines and Parquet that holds text. Where it is missing, the conversation in `messages` is read.
    pub field: String,
    /// Bytes to take at most: of more, files at even distances are taken. If absent, all, and 4,000,000 of the Cargo registry.
    pub max_bytes: Option<u64>,
    /// Several sources, each a table, instead of `paths`, `format`, `field` and `max_bytes`.
    pub sources: Vec<DataSource>,
    /// How documents become sequences. If absent, `whole` for conversations and `wrapped` for others.
    pub packing: Option<Packing>,
    /// Share of the tokens that is not trained on, but held out for the held-out loss. With 0 there is no such loss. With `validation`
    /// nothing is held out, whatever this says.
    pub held_out_fraction: f64,
    /// Files and folders of which the held-out loss is, instead of a share of what is trained on; read as `format` and `field` say.
    pub validation: Vec<PathBuf>,
    /// A folder of a Hugging Face checkpoint, a `tokenizer.json`, a `tokenizer.model`, or `bytes`, in which a byte is a token. If absent,
    /// the tokenizer in `model.hf_path`, and `bytes` for a preset.
    pub tokenizer: Option<String>,
    /// Jinja file that makes text of `messages`. If absent, the one in the tokenizer's folder.
    pub chat_template: Option<PathBuf>,
    /// Variables of the chat template, a table: `{ enable_thinking = false }`. A row's own `chat_template_kwargs`
    /// and `enable_thinking` override them.
    #[serde(skip_serializing_if = "Map::is_empty", deserialize_with = "variables")]
    pub chat_template_kwargs: Map<String, Value>,
    /// Folder in which tokens are kept for later runs. If absent, `burn-float8/tokens` in the user's cache folder, `$XDG_CACHE_HOME` or
    /// `~/.cache`.
    pub cache: Option<PathBuf>,
}

/// Reads a table of JSON values. JSON has no dates, and turns inf and nan into null: these are errors.
pub(crate) fn variables<'de, D: Deserializer<'de>>(table: D) -> Result<Map<String, Value>, D::Error> {
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
        Some((key, _)) => Err(D::Error::custom(format!("`{key}` has inf or nan, which templates cannot have"))),
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
            held_out_fraction: 0.05,
            validation: vec![],
            tokenizer: None,
            chat_template: None,
            chat_template_kwargs: Map::new(),
            cache: None,
        }
    }
}

impl DataSection {
    /// Bytes that are taken of the Cargo registry.
    const REGISTRY_BYTES: u64 = 4_000_000;

    /// Checks what the types do not.
    ///
    /// # Errors
    /// [`ConfigError::Value`] naming the first key that cannot be.
    pub fn validate(&self) -> Result<(), ConfigError> {
        if let Some(max_bytes) = self.max_bytes {
            require("data.max_bytes", max_bytes, max_bytes >= 1, "must be at least 1")?;
        }
        let held_out = self.held_out_fraction;
        require("data.held_out_fraction", held_out, (0.0..1.0).contains(&held_out), "must be in [0, 1)")?;
        let default = Self::default();
        let is_alone =
            self.paths.is_empty() && self.format.is_none() && self.field == default.field && self.max_bytes.is_none();
        let reason = "each source has its own paths, format, field and max_bytes: remove those of [data]";
        require("data.sources", format!("{} sources", self.sources.len()), self.sources.is_empty() || is_alone, reason)
    }

    /// Reads these files and folders instead, if there are any.
    pub fn replace_paths(&mut self, paths: &[PathBuf]) {
        if !paths.is_empty() {
            self.paths = paths.to_vec();
            self.sources.clear();
        }
    }

    /// Whether nobody has said what to train on.
    pub fn is_default(&self) -> bool {
        self.paths.is_empty() && self.sources.is_empty()
    }

    /// What to read.
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

    /// Where tokens are kept.
    pub fn cache(&self) -> PathBuf {
        self.cache.clone().unwrap_or_else(|| {
            let set = std::env::var_os("XDG_CACHE_HOME").filter(|path| !path.is_empty()).map(PathBuf::from);
            let default = || std::env::home_dir().map(|home| home.join(".cache"));
            let user = set.or_else(default).unwrap_or_else(std::env::temp_dir);
            user.join("burn-float8").join("tokens")
        })
    }

    /// Opens it.
    ///
    /// # Errors
    /// Any [`DataError`]; for the Cargo registry, which nobody asked for, [`DataError::NoDefaultText`].
    pub fn open(
        &self,
        tokenizer: &Tokenizer,
        template: Option<&ChatTemplate>,
        progress: &mut dyn FnMut(Progress),
    ) -> Result<Dataset, DataError> {
        let validation = [self.like(&self.validation)];
        let validation = match self.validation.is_empty() {
            true => Validation::Fraction(self.held_out_fraction),
            false => Validation::Sources(&validation),
        };
        let data = Dataset::open(&self.sources(), validation, tokenizer, template, &self.cache(), progress);
        data.map_err(|error| match error {
            error @ (DataError::Io { .. } | DataError::NoText { .. }) if self.is_default() => {
                DataError::NoDefaultText(Box::new(error))
            }
            error => error,
        })
    }

    /// Opens other files, only to judge a model by all of them.
    ///
    /// # Errors
    /// Any [`DataError`].
    pub fn open_validation(
        &self,
        paths: &[PathBuf],
        tokenizer: &Tokenizer,
        template: Option<&ChatTemplate>,
        progress: &mut dyn FnMut(Progress),
    ) -> Result<Dataset, DataError> {
        let sources = [self.like(paths)];
        Dataset::open(&[], Validation::Sources(&sources), tokenizer, template, &self.cache(), progress)
    }

    /// A source of these files, read as the others are.
    fn like(&self, paths: &[PathBuf]) -> DataSource {
        DataSource { format: self.format, field: self.field.clone(), ..DataSource::new(paths) }
    }
}
