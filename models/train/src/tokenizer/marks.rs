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
    /// Replaces what the files beside `tokenizer` say, as transformers reads them.
    ///
    /// - BOS is what the tokenizer itself puts before a text. `add_bos_token` of `tokenizer_config.json` says otherwise: `false` that there
    ///   is none, `true` that it is `bos_token`, else `bos_token_id` of `generation_config.json`.
    /// - EOS is `eos_token` of `tokenizer_config.json`, else the first token at which generation ends.
    /// - Generation ends at `eos_token_id` of `generation_config.json`, else of `config.json`, else at the tokenizer's own, else at EOS.
    pub(super) fn with_files_beside(
        self,
        tokenizer: &Path,
        vocab_size: usize,
        id_of: impl Fn(&str) -> Option<u32>,
    ) -> Result<Self, TokenizerError> {
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
