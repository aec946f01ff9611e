//! Ids to text one at a time, in whole characters.

use super::hugging_face::{self, HuggingFace};
use super::{Kind, Tokenizer, TokenizerError};

/// Decodes ids one after another. The pieces, put together, are the text of all ids.
pub struct TextStream<'a> {
    tokenizer: &'a Tokenizer,
    skip_special: bool,
    state: State<'a>,
}

enum State<'a> {
    /// The beginning of a character.
    Bytes(Vec<u8>),
    HuggingFace(&'a HuggingFace, hugging_face::Stream),
}

impl<'a> TextStream<'a> {
    pub(super) fn new(tokenizer: &'a Tokenizer, skip_special: bool) -> Self {
        let state = match &tokenizer.kind {
            Kind::HuggingFace(tokenizer) => State::HuggingFace(tokenizer, hugging_face::Stream::default()),
            Kind::Bytes | Kind::Tiktoken(_) => State::Bytes(vec![]),
        };
        Self { tokenizer, skip_special, state }
    }

    /// The text that ends with this id; empty while a character has not ended.
    ///
    /// # Errors
    /// [`TokenizerError::UnknownId`], [`TokenizerError::Decode`].
    pub fn push(&mut self, id: u32) -> Result<String, TokenizerError> {
        self.tokenizer.check(id)?;
        match &mut self.state {
            State::HuggingFace(tokenizer, stream) => {
                let text = stream.push(tokenizer, id, self.skip_special);
                text.map_err(|reason| TokenizerError::Decode { reason })
            }
            State::Bytes(bytes) => {
                match &self.tokenizer.kind {
                    Kind::Tiktoken(tokenizer) if self.skip_special && tokenizer.is_special(id) => {}
                    Kind::Tiktoken(tokenizer) => bytes.extend(tokenizer.bytes(id).unwrap_or_default()),
                    // BOS is no byte.
                    _ => bytes.extend(u8::try_from(id)),
                }
                Ok(take_characters(bytes))
            }
        }
    }

    /// The text of ids that nothing follows.
    ///
    /// # Errors
    /// As [`push`](Self::push).
    pub fn read(mut self, ids: &[u32]) -> Result<String, TokenizerError> {
        let text = ids.iter().map(|id| self.push(*id)).collect::<Result<String, _>>()?;
        Ok(text + &self.finish()?)
    }

    /// What is left: `�` for a character that has not ended.
    ///
    /// # Errors
    /// [`TokenizerError::Decode`].
    pub fn finish(self) -> Result<String, TokenizerError> {
        match self.state {
            State::HuggingFace(tokenizer, stream) => {
                let text = stream.finish(tokenizer, self.skip_special);
                text.map_err(|reason| TokenizerError::Decode { reason })
            }
            State::Bytes(bytes) => Ok(String::from_utf8_lossy(&bytes).into_owned()),
        }
    }
}

/// Takes all but the beginning of a character that may still end. Bytes that are no UTF-8, whatever follows, become `�`.
fn take_characters(bytes: &mut Vec<u8>) -> String {
    let incomplete = match bytes.utf8_chunks().last() {
        // The last bytes are wrong only because they stop.
        Some(last) if core::str::from_utf8(last.invalid()).is_err_and(|error| error.error_len().is_none()) => {
            last.invalid().len()
        }
        _ => 0,
    };
    let rest = bytes.split_off(bytes.len() - incomplete);
    let text = String::from_utf8_lossy(bytes).into_owned();
    *bytes = rest;
    text
}
