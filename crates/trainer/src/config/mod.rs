//! A run's configuration: the sections shared by all models, read from a TOML file,
//! `section.key=value` and flags.
//!
//! Later wins: defaults, file, settings in order. An unknown key is an error that names it.

mod activations;
mod data;
mod float8;
mod length;
mod lora;
mod optimizer;
mod schema;
mod sections;

use std::path::{Path, PathBuf};

pub use activations::ActivationCheckpointing;
pub use data::DataSection;
pub use data::variables;
pub use float8::Float8Section;
pub use length::{NoLength, StepCount};
pub use lora::{LoraBase, LoraSection};
pub use optimizer::OptimizerSection;
pub(crate) use optimizer::{FINE_TUNING_LR, LORA_LR, RANDOM_LR};
pub use schema::schema;
use schemars::JsonSchema;
pub use sections::{CheckpointSection, Precision, StorageDtype, TrainingSection};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use toml::{Table, Value};

use crate::files;

/// Error in a configuration.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file could not be read.
    #[error("cannot read {}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// The system's reason.
        source: std::io::Error,
    },
    /// A file, setting or flag that does not parse or has an unknown key.
    #[error("{origin}: {reason}")]
    Parse {
        /// The file or the argument.
        origin: String,
        /// Reason, naming the key.
        reason: String,
    },
    /// A key has an invalid value.
    #[error("{key} = {value}: {reason}")]
    Value {
        /// The dotted key.
        key: &'static str,
        /// Its value.
        value: String,
        /// Why it is invalid.
        reason: String,
    },
}

/// A number or a text in a file.
#[derive(Serialize, Deserialize, JsonSchema)]
#[serde(untagged, expecting = "expected an integer of 0 or more, or a text")]
#[schemars(inline)]
enum LengthText {
    /// Steps.
    Number(usize),
    /// Epochs: `"3 epochs"`.
    Text(String),
}

/// `section.key=value` and its origin for error messages.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Setting {
    /// `--set section.key=value`, or the equivalent flag.
    pub origin: String,
    /// `section.key=value`; a value that is not TOML is a string.
    pub setting: String,
}

impl Setting {
    /// Setting from `--set`.
    pub fn new(setting: impl Into<String>) -> Self {
        let setting = setting.into();
        Self { origin: format!("--set {setting}"), setting }
    }

    /// Whether it sets one of these keys.
    pub fn is_of(&self, keys: &[&str]) -> bool {
        self.key().is_some_and(|key| keys.contains(&key))
    }

    /// Dotted key.
    fn key(&self) -> Option<&str> {
        self.setting.split_once('=').map(|(key, _)| key.trim())
    }

    /// Hint for values that look like TOML but were used as strings.
    fn hint(&self) -> String {
        let text = self.setting.split_once('=').map_or("", |(_, text)| text.trim());
        let is_toml = toml::from_str::<Table>(&format!("value = {text}")).is_ok();
        match text.starts_with(['[', '{']) && !is_toml {
            true => format!(
                "; {text} is not TOML, in which texts are in quotes, as in [\"lm_head\"], so it was taken for a text"
            ),
            false => String::new(),
        }
    }

    /// Inserts the value into `table`. A value that is not TOML is a string, so `precision=fp8`
    /// needs no quotes.
    fn put(&self, table: &mut Table) -> Result<(), String> {
        let key = self.key().ok_or("expected section.key=value")?;
        let text = self.setting.split_once('=').map_or("", |(_, text)| text);
        let value = toml::from_str::<Table>(&format!("value = {text}"))
            .ok()
            .and_then(|mut table| table.remove("value").filter(|_| table.is_empty()))
            .unwrap_or_else(|| Value::String(text.into()));
        let mut parts: Vec<&str> = key.split('.').collect();
        let last = parts.pop().filter(|last| !last.is_empty() && !parts.is_empty());
        let last = last.ok_or("expected section.key=value")?;
        let mut inner = table;
        for part in parts {
            let entry = inner.entry(part).or_insert_with(|| Value::Table(Table::new()));
            inner = entry.as_table_mut().ok_or_else(|| format!("`{part}` of `{key}` is not a section"))?;
        }
        inner.insert(last.into(), value);
        Ok(())
    }
}

/// Reads a TOML file, if given, and applies `settings` in order. For each pair in `replaces`, a
/// setting of the first key removes the file's second.
///
/// # Errors
/// [`ConfigError::Io`]; [`ConfigError::Parse`] naming the file or the setting, and the key.
pub fn load<T: DeserializeOwned + Default>(
    file: Option<&Path>,
    settings: &[Setting],
    replaces: &[(&str, &str)],
) -> Result<T, ConfigError> {
    let mut table = Table::new();
    let mut config = T::default();
    if let Some(path) = file {
        let text =
            files::read_to_string(path).map_err(|source| ConfigError::Io { path: path.to_path_buf(), source })?;
        table = from_toml(path, &text)?;
        let mut whole = table.clone();
        // With settings, `apply` reads the adapter: a setting may name another one.
        let has_adapter = settings.is_empty()
            && lora::of_adapter(&mut whole)
                .map_err(|reason| ConfigError::Parse { origin: path.display().to_string(), reason })?;
        config = match has_adapter {
            // Parses the original text if it is complete, so that errors show the line.
            false => from_toml(path, &text)?,
            true => from_toml(path, &to_toml(&whole)?)?,
        };
    }
    match settings.is_empty() {
        true => Ok(config),
        false => apply(table, settings, replaces),
    }
}

/// Reads a configuration from the text of `origin`.
///
/// # Errors
/// [`ConfigError::Parse`] naming the file, the line and the key.
pub fn from_toml<T: DeserializeOwned>(origin: &Path, text: &str) -> Result<T, ConfigError> {
    toml::from_str(text).map_err(|error| ConfigError::Parse {
        origin: origin.display().to_string(),
        reason: plain(error.to_string().trim_end()),
    })
}

/// Replaces Rust type names in an error by plain words, and suggests the key that an unknown one
/// resembles.
fn plain(error: &str) -> String {
    let types = [
        (&["usize", "u64", "u32"][..], "an integer of 0 or more"),
        (&["i64"], "an integer"),
        (&["f64", "f32"], "a number"),
        (&["a boolean"], "true or false"),
        (&["path string"], "a path in quotes"),
        (&["a sequence"], "a list, as [\"a\", \"b\"]"),
        (&["a map"], "a table, as { key = 1 }"),
    ];
    let mut error = error.to_string();
    for (name, plain) in types.into_iter().flat_map(|(names, plain)| names.iter().map(move |name| (name, plain))) {
        let expected = format!("expected {name}");
        // Only whole words: serde also writes "expected a string or a map".
        if let Some(at) = error.find(&expected)
            && !error[at + expected.len()..].starts_with(|c: char| c.is_ascii_alphanumeric() || c == ' ')
        {
            error.replace_range(at..at + expected.len(), &format!("expected {plain}"));
        }
    }
    // Serde names the unknown key, then the known ones.
    let names = error.find("unknown field `").map(|at| error[at..].split('`').skip(1).step_by(2).collect::<Vec<_>>());
    let similar = names.as_ref().map_or_else(String::new, |names| similar(names[0], &names[1..]));
    error + &similar
}

/// Keys of other trainers, and ours.
const SYNONYMS: [(&str, &str); 10] = [
    ("learning_rate", "lr"),
    ("max_grad_norm", "grad_clip_norm"),
    ("max_norm", "grad_clip_norm"),
    ("epochs", "steps"),
    ("num_train_epochs", "steps"),
    ("local_batch_size", "batch_size"),
    ("r", "rank"),
    ("lora_alpha", "alpha"),
    ("interval", "save_steps"),
    ("keep_latest_k", "save_total_limit"),
];

/// Suggestion of the known key that an unknown key means or resembles; empty if there is none.
pub fn similar(unknown: &str, known: &[&str]) -> String {
    const LEAST: f64 = 0.8;
    let meant = |(other, ours): &(&str, &str)| *other == unknown && known.contains(ours);
    if let Some((_, key)) = SYNONYMS.iter().find(|synonym| meant(synonym)) {
        return format!("; did you mean `{key}`?");
    }
    let all = known.iter().map(|name| (strsim::jaro_winkler(unknown, name), name));
    let similar = all.max_by(|a, b| a.0.total_cmp(&b.0)).filter(|(likeness, _)| *likeness >= LEAST);
    similar.map_or_else(String::new, |(_, key)| format!("; did you mean `{key}`?"))
}

/// Applies `settings` in order to an existing configuration.
///
/// # Errors
/// [`ConfigError::Parse`] naming the setting and the key.
pub fn change<T: DeserializeOwned + Serialize>(
    config: &T,
    settings: &[Setting],
    replaces: &[(&str, &str)],
) -> Result<T, ConfigError> {
    apply(to_table(config)?, settings, replaces)
}

fn apply<T: DeserializeOwned>(
    mut table: Table,
    settings: &[Setting],
    replaces: &[(&str, &str)],
) -> Result<T, ConfigError> {
    for (key, replaced) in replaces {
        if settings.iter().any(|setting| setting.key() == Some(key))
            && let Some((section, key)) = replaced.split_once('.')
            && let Some(Value::Table(section)) = table.get_mut(section)
        {
            section.remove(key);
        }
    }
    let fail =
        |origin: &str, error: &str| ConfigError::Parse { origin: origin.into(), reason: plain(error.trim_end()) };
    // Settings may be valid only together, so all are applied before parsing. An error is
    // attributed to the setting after the last valid prefix.
    let (start, mut tables) = (table.clone(), vec![]);
    for setting in settings {
        setting.put(&mut table).map_err(|reason| fail(&setting.origin, &reason))?;
        tables.push(table.clone());
    }
    let parse = |mut table: Table| -> Result<T, String> {
        lora::of_adapter(&mut table)?;
        table.try_into().map_err(|error: toml::de::Error| error.message().to_string())
    };
    let errors: Vec<_> = match parse(table) {
        Ok(config) => return Ok(config),
        Err(_) => tables.into_iter().map(|table| parse(table).err()).collect(),
    };
    let first = errors.iter().rposition(Option::is_none).map_or(0, |fine| fine + 1);
    // If the other settings are valid without it, the error of the complete table is the current
    // one.
    let mut without = start;
    let mut others = settings.iter().enumerate().filter(|(i, _)| *i != first);
    let is_only_one = others.all(|(_, setting)| setting.put(&mut without).is_ok()) && parse(without).is_ok();
    let error = &errors[if is_only_one { errors.len() - 1 } else { first }];
    let blamed = &settings[first];
    Err(fail(&blamed.origin, &format!("{}{}", error.as_deref().unwrap_or_default(), blamed.hint())))
}

/// Whole configuration as TOML, including defaults. [`load`] reads it back.
///
/// # Errors
/// [`ConfigError::Parse`] for values that TOML cannot represent, such as an integer beyond 63 bits.
pub fn to_toml(config: &impl Serialize) -> Result<String, ConfigError> {
    toml::to_string(config).map_err(|error| not_toml(&error))
}

/// Like [`to_toml`], as a table.
pub(crate) fn to_table(config: &impl Serialize) -> Result<Table, ConfigError> {
    Table::try_from(config).map_err(|error| not_toml(&error))
}

fn not_toml(error: &toml::ser::Error) -> ConfigError {
    ConfigError::Parse { origin: "the configuration".into(), reason: error.to_string() }
}

/// Returns an error unless `holds`.
///
/// # Errors
/// [`ConfigError::Value`].
pub fn require(key: &'static str, value: impl ToString, holds: bool, reason: &str) -> Result<(), ConfigError> {
    if holds {
        return Ok(());
    }
    Err(ConfigError::Value { key, value: value.to_string(), reason: reason.into() })
}
