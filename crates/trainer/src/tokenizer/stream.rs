//! Decodes ids to text one at a time, in whole characters.

use anyhow::Result;

use super::hugging_face::{self, HuggingFace};
use super::{Kind, Tokenizer};

/// Decoder of one id after another. Its pieces together are the text of all ids.
pub struct TextStream<'a> {
    tokenizer: &'a Tokenizer,
    skip_special: bool,
    state: State<'a>,
}

enum State<'a> {
    /// Beginning of an incomplete character.
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

    /// Text that this id completes; empty while a character is incomplete.
    ///
    /// # Errors
    /// An id outside the vocabulary, or one that the decoder refuses.
    pub fn push(&mut self, id: u32) -> Result<String> {
        self.tokenizer.check(id)?;
        match &mut self.state {
            State::HuggingFace(tokenizer, stream) => stream.push(tokenizer, id, self.skip_special),
            State::Bytes(bytes) => {
                match &self.tokenizer.kind {
                    Kind::Tiktoken(tokenizer) if self.skip_special && tokenizer.is_special(id) => {}
                    Kind::Tiktoken(tokenizer) => bytes.extend(tokenizer.bytes(id).unwrap_or_default()),
                    // BOS is not a byte.
                    _ => bytes.extend(u8::try_from(id)),
                }
                Ok(take_characters(bytes))
            }
        }
    }

    /// Text of the last ids of a stream.
    ///
    /// # Errors
    /// Same as [`push`](Self::push).
    pub fn read(mut self, ids: &[u32]) -> Result<String> {
        let text = ids.iter().map(|id| self.push(*id)).collect::<Result<String>>()?;
        Ok(text + &self.finish()?)
    }

    /// Rest of the text: `�` for an incomplete character.
    ///
    /// # Errors
    /// Ids that the decoder refuses.
    pub fn finish(self) -> Result<String> {
        match self.state {
            State::HuggingFace(tokenizer, stream) => stream.finish(tokenizer, self.skip_special),
            State::Bytes(bytes) => Ok(String::from_utf8_lossy(&bytes).into_owned()),
        }
    }
}

/// Takes all bytes except an incomplete character at the end. Bytes that can never be UTF-8 become
/// `�`.
fn take_characters(bytes: &mut Vec<u8>) -> String {
    let incomplete = match bytes.utf8_chunks().last() {
        // The last bytes are invalid only because they are incomplete.
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
