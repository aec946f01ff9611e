//! [`ConfigFile`]: JSON objects in files next to a tokenizer. [`Marks`]: the tokens that begin and end
//! a text, according to these files.

use std::path::{Path, PathBuf};

use anyhow::Result;
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
        Ok(Self { map: files::read_object(&path)?, path })
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

/// Tokens that begin and end a text.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Marks {
    /// Token that begins a text.
    pub(super) bos: Option<u32>,
    /// Token that ends a document.
    pub(super) eos: Option<u32>,
    /// Tokens that end generation.
    pub(super) stop: Vec<u32>,
}

impl Marks {
    /// Applies the settings of the files next to `tokenizer`, as transformers reads them.
    ///
    /// - BOS is the token that the tokenizer itself puts before a text, unless
    ///   `tokenizer_config.json` has `add_bos_token`. With `false` there is no BOS. With `true` it
    ///   is `bos_token`, else the tokenizer's own, else `bos_token_id` of `generation_config.json`.
    /// - EOS is `eos_token` of `tokenizer_config.json`, else the tokenizer's own, else the first
    ///   token that ends generation.
    /// - Generation ends at `eos_token_id` of `generation_config.json`, else of `config.json`, else
    ///   at the tokenizer's own tokens, else at EOS.
    pub(super) fn with_files_beside(
        self,
        tokenizer: &Path,
        vocab_size: usize,
        id_of: impl Fn(&str) -> Option<u32>,
    ) -> Result<Self> {
        let read = |name| ConfigFile::read(tokenizer.with_file_name(name));
        let (generation, config) = (read("generation_config.json")?, read("tokenizer_config.json")?);
        let bos = match config.get("add_bos_token").and_then(Value::as_bool) {
            None => self.bos,
            Some(false) => None,
            Some(true) => match config.token("bos_token", &id_of)?.or(self.bos) {
                Some(bos) => Some(bos),
                None => generation.ids("bos_token_id", vocab_size)?.first().copied(),
            },
        };
        let mut stop = generation.ids("eos_token_id", vocab_size)?;
        if stop.is_empty() {
            stop = read("config.json")?.ids("eos_token_id", vocab_size)?;
        }
        let eos = config.token("eos_token", &id_of)?.or(self.eos).or(stop.first().copied());
        if stop.is_empty() {
            stop = if self.stop.is_empty() { eos.into_iter().collect() } else { self.stop };
        }
        Ok(Self { bos, eos, stop })
    }
}
