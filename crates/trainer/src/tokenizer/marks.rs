//! Tokens that begin and end a text, from the files next to a tokenizer.

use std::path::Path;

use serde_json::Value;

use super::ConfigFile;

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
    ) -> anyhow::Result<Self> {
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
