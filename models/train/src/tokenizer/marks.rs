//! Which tokens begin and end a text: what the files beside a tokenizer say.

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::{Map, Value};

use super::TokenizerError;

/// The tokens that begin and end a text.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Marks {
    /// Begins a text.
    pub(super) bos: Option<u32>,
    /// Ends a document.
    pub(super) eos: Option<u32>,
    /// Any of these ends generation.
    pub(super) stop: Vec<u32>,
}

impl Marks {
    /// Replaces what `tokenizer_config.json` (`bos_token`, `eos_token`, `add_bos_token`) and `generation_config.json`
    /// (`bos_token_id`, `eos_token_id`) beside `tokenizer` say. Of a text the first decides, of generation the second.
    pub(super) fn with_files_beside(
        self,
        tokenizer: &Path,
        vocab_size: usize,
        id_of: impl Fn(&str) -> Option<u32>,
    ) -> Result<Self, TokenizerError> {
        let generation = File::read(tokenizer.with_file_name("generation_config.json"))?;
        let config = File::read(tokenizer.with_file_name("tokenizer_config.json"))?;
        let [generation_bos, generation_eos] =
            ["bos_token_id", "eos_token_id"].map(|key| generation.ids(key, vocab_size));
        let (generation_bos, generation_eos) = (generation_bos?, generation_eos?);
        let begins = config.map.get("add_bos_token").and_then(Value::as_bool).unwrap_or(true);
        let bos = config.token("bos_token", &id_of)?.or(self.bos).or(generation_bos.first().copied());
        let eos = config.token("eos_token", &id_of)?.or(self.eos).or(generation_eos.first().copied());
        let stop = if !generation_eos.is_empty() {
            generation_eos
        } else if self.stop.is_empty() {
            eos.into_iter().collect()
        } else {
            self.stop
        };
        Ok(Self { bos: bos.filter(|_| begins), eos, stop })
    }
}

/// A JSON object; empty if the file is not there.
struct File {
    path: PathBuf,
    map: Map<String, Value>,
}

impl File {
    fn read(path: PathBuf) -> Result<Self, TokenizerError> {
        let text = match fs::read_to_string(&path) {
            Ok(text) => text,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Self { path, map: Map::new() }),
            Err(source) => return Err(TokenizerError::Io { path, source }),
        };
        match serde_json::from_str(&text) {
            Ok(map) => Ok(Self { path, map }),
            Err(source) => Err(TokenizerError::Json { path, source }),
        }
    }

    fn get(&self, key: &str) -> Option<&Value> {
        self.map.get(key).filter(|value| !value.is_null())
    }

    /// An id or several.
    fn ids(&self, key: &'static str, vocab_size: usize) -> Result<Vec<u32>, TokenizerError> {
        let values = match self.get(key) {
            None => return Ok(vec![]),
            Some(Value::Array(values)) => values.iter().collect(),
            Some(value) => vec![value],
        };
        let id = |value: &Value| u32::try_from(value.as_u64()?).ok().filter(|id| (*id as usize) < vocab_size);
        values.into_iter().map(|value| id(value).ok_or_else(|| self.no_token(key, value))).collect()
    }

    /// A token by its text, which may be the `content` of an object.
    fn token(&self, key: &'static str, id_of: impl Fn(&str) -> Option<u32>) -> Result<Option<u32>, TokenizerError> {
        let Some(value) = self.get(key) else { return Ok(None) };
        let text = value.as_str().or_else(|| value.get("content")?.as_str());
        let id = text.and_then(id_of).ok_or_else(|| self.no_token(key, value))?;
        Ok(Some(id))
    }

    fn no_token(&self, key: &'static str, value: &Value) -> TokenizerError {
        TokenizerError::NotAToken { path: self.path.clone(), key, value: value.to_string() }
    }
}
