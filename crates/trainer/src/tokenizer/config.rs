//! JSON objects in files next to a tokenizer.

use std::path::PathBuf;

use anyhow::{Context, Result};
use serde_json::{Map, Value};

use crate::files;

/// Keys of single special tokens in `tokenizer_config.json`, in the order in which transformers
/// adds them. Templates use the same names.
pub(crate) const SPECIAL_TOKENS: [&str; 7] =
    ["bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"];

/// JSON object of a file; empty if the file is missing.
pub(crate) struct ConfigFile {
    pub(super) path: PathBuf,
    pub(super) map: Map<String, Value>,
}

impl ConfigFile {
    pub(crate) fn read(path: PathBuf) -> Result<Self> {
        let text = match files::read_to_string(&path) {
            Ok(text) => text,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Self { path, map: Map::new() }),
            Err(error) => return Err(error).with_context(|| format!("cannot read {}", path.display())),
        };
        let map = serde_json::from_str(&text).with_context(|| format!("{} is not valid", path.display()))?;
        Ok(Self { path, map })
    }

    pub(crate) fn get(&self, key: &str) -> Option<&Value> {
        self.map.get(key).filter(|value| !value.is_null())
    }

    /// Whether a key of a special token, such as `eos_token`, has this text.
    pub(super) fn has_special(&self, token: &str) -> bool {
        let is_it = |value: &Value| value == token || value["content"] == token;
        self.map.iter().any(|(key, value)| match value {
            Value::Array(values) => key.ends_with("special_tokens") && values.iter().any(is_it),
            value => key.ends_with("_token") && is_it(value),
        })
    }

    /// Reads one or more ids.
    pub(super) fn ids(&self, key: &'static str, vocab_size: usize) -> Result<Vec<u32>> {
        let values = match self.get(key) {
            None => return Ok(vec![]),
            Some(Value::Array(values)) => values.iter().collect(),
            Some(value) => vec![value],
        };
        let id = |value: &Value| u32::try_from(value.as_u64()?).ok().filter(|id| (*id as usize) < vocab_size);
        values.into_iter().map(|value| id(value).ok_or_else(|| self.no_token(key, value))).collect()
    }

    /// Id of the token with this key.
    pub(super) fn token(&self, key: &'static str, id_of: impl Fn(&str) -> Option<u32>) -> Result<Option<u32>> {
        let Some(text) = self.token_text(key)? else { return Ok(None) };
        let id = id_of(text).ok_or_else(|| self.no_token(key, &self.map[key]))?;
        Ok(Some(id))
    }

    /// Text of the token with this key, which may be the `content` of an object.
    pub(crate) fn token_text(&self, key: &'static str) -> Result<Option<&str>> {
        let Some(value) = self.get(key) else { return Ok(None) };
        let text = value.as_str().or_else(|| value.get("content")?.as_str());
        text.map(Some).ok_or_else(|| self.no_token(key, value))
    }

    pub(super) fn no_token(&self, key: &'static str, value: &Value) -> anyhow::Error {
        anyhow::anyhow!("{}: {key} = {value} is not a token of this tokenizer", self.path.display())
    }
}
