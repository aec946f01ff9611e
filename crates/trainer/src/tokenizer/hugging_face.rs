//! Hugging Face's `tokenizer.json`, read by their library. Unsupported files are errors even where
//! the library panics, since they may be untrusted.

use std::fmt::Display;
use std::ops::Range;
use std::path::Path;
use std::sync::OnceLock;

use anyhow::{Result, anyhow};
use serde_json::Value;
use tokenizers::AddedToken;

use super::{SpecialTokens, added, limits, not_valid};
use crate::panics::caught;

/// Loaded `tokenizer.json`.
pub(super) struct HuggingFace {
    /// Encodes special tokens as text.
    text: tokenizers::Tokenizer,
    /// Encodes special tokens as tokens. Most programs never need this copy.
    special: OnceLock<Box<tokenizers::Tokenizer>>,
    vocab_size: usize,
    first: Option<u32>,
    /// Tokens that are not in the file.
    added: Vec<AddedToken>,
}

/// Converts panics to errors: the library panics on inconsistent files.
fn without_panic<T, E: Display>(call: impl FnOnce() -> Result<T, E>) -> Result<T> {
    caught(call).map_err(|panic| anyhow!(panic))?.map_err(|error| anyhow!("{error}"))
}

impl HuggingFace {
    /// Reads a tokenizer. `path` is used for errors and for the files next to it.
    pub(super) fn from_bytes(bytes: &[u8], path: &Path) -> Result<Self> {
        let fail = |reason| not_valid(path, reason);
        let json: Value = serde_json::from_slice(bytes).map_err(|error| not_valid(path, error))?;
        limits::check(&json).map_err(|reason| limits::refused(path, reason))?;
        let mut text = without_panic(|| tokenizers::Tokenizer::from_bytes(bytes)).map_err(fail)?;
        // The file may set a padding or a truncation length.
        text.with_padding(None).with_truncation(None).map_err(|error| not_valid(path, error))?;
        let added = caught(|| added::add(&mut text, path)).map_err(|panic| not_valid(path, panic))??;
        text.set_encode_special_tokens(true);
        // Detects a post-processor that contradicts the vocabulary.
        without_panic(|| text.encode_fast("", true)).map_err(fail)?;
        // The ids of an empty text do not show whether a token comes before or after a text. Some
        // vocabularies lack `a`.
        let first = without_panic(|| text.encode("a", true)).ok().and_then(|encoding| {
            let is_added = *encoding.get_special_tokens_mask().first()? == 1;
            is_added.then(|| encoding.get_ids()[0])
        });
        let largest = text.get_vocab(true).into_values().max();
        let vocab_size = largest.ok_or_else(|| not_valid(path, "it has no tokens"))? as usize + 1;
        Ok(Self { text, special: OnceLock::new(), vocab_size, first, added })
    }

    pub(super) fn added(&self) -> &[AddedToken] {
        &self.added
    }

    pub(super) fn vocab_size(&self) -> usize {
        self.vocab_size
    }

    pub(super) fn id(&self, token: &str) -> Option<u32> {
        self.text.token_to_id(token)
    }

    pub(super) fn encode(&self, text: &str, special: SpecialTokens) -> Result<Vec<u32>> {
        let tokenizer = match special {
            SpecialTokens::AreText => &self.text,
            SpecialTokens::InText => self.special(),
        };
        let encoding = without_panic(|| tokenizer.encode_fast(text, false))?;
        Ok(encoding.get_ids().to_vec())
    }

    /// Same as `Tokenizer::encode_with_ranges`.
    pub(super) fn encode_with_ranges(&self, text: &str) -> Result<(Vec<u32>, Vec<Range<usize>>)> {
        let encoding = without_panic(|| self.special().encode(text, false))?;
        let mut end = 0;
        let range = |&(start, own_end): &(usize, usize)| {
            let start = start.min(end);
            end = end.max(own_end);
            start..end
        };
        let ranges = encoding.get_offsets().iter().map(range).collect();
        Ok((encoding.get_ids().to_vec(), ranges))
    }

    /// Ids of a text, with special tokens as text, and the word ends that are followed by another
    /// word.
    pub(super) fn words(&self, text: &str) -> Result<(Vec<u32>, Vec<usize>)> {
        let encoding = without_panic(|| self.text.encode(text, false))?;
        let (words, offsets) = (encoding.get_word_ids(), encoding.get_offsets());
        let changes = (1..words.len()).filter(|i| words[*i] != words[i - 1]);
        Ok((encoding.get_ids().to_vec(), changes.map(|i| offsets[i].0).collect()))
    }

    pub(super) fn is_special(&self, id: u32) -> bool {
        self.text.get_added_vocabulary().get_added_tokens_decoder().get(&id).is_some_and(|token| token.special)
    }

    fn special(&self) -> &tokenizers::Tokenizer {
        self.special.get_or_init(|| {
            let mut special = self.text.clone();
            special.set_encode_special_tokens(false);
            Box::new(special)
        })
    }

    /// Token that the tokenizer itself puts before a text.
    pub(super) fn first(&self) -> Option<u32> {
        self.first
    }

    pub(super) fn decode(&self, ids: &[u32], skip_special: bool) -> Result<String> {
        let decoded = without_panic(|| self.text.decode(ids, skip_special));
        decoded.map_err(|reason| anyhow!("cannot decode: {reason}"))
    }
}
