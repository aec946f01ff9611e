//! Which tokens begin and end a text: what the files beside a tokenizer say.

use std::path::Path;

use serde_json::Value;

use super::{ConfigFile, TokenizerError};

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
        let generation = ConfigFile::read(tokenizer.with_file_name("generation_config.json"))?;
        let config = ConfigFile::read(tokenizer.with_file_name("tokenizer_config.json"))?;
        let [generation_bos, generation_eos] =
            ["bos_token_id", "eos_token_id"].map(|key| generation.ids(key, vocab_size));
        let (generation_bos, generation_eos) = (generation_bos?, generation_eos?);
        let begins = config.get("add_bos_token").and_then(Value::as_bool).unwrap_or(true);
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
