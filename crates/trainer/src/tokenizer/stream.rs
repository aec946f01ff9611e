//! Decodes ids to text one at a time, in whole characters.

use anyhow::{Context, Result};

use super::Tokenizer;

/// Decoder of one id after another. Its pieces together are the text of all ids.
pub struct TextStream<'a> {
    tokenizer: &'a Tokenizer,
    skip_special: bool,
    /// Ids of the last piece, since some decoders depend on the ids before, then the ids after it.
    ids: Vec<u32>,
    /// Number of the first ids whose text was returned, and that text.
    num_done: usize,
    done: String,
}

impl<'a> TextStream<'a> {
    pub(super) fn new(tokenizer: &'a Tokenizer, skip_special: bool) -> Self {
        Self { tokenizer, skip_special, ids: vec![], num_done: 0, done: String::new() }
    }

    /// Text that this id completes; empty while a character is incomplete.
    ///
    /// # Errors
    /// An id outside the vocabulary, or one that the decoder refuses.
    pub fn push(&mut self, id: u32) -> Result<String> {
        self.ids.push(id);
        let piece = self.rest()?;
        // This may be the beginning of a character.
        if piece.is_empty() || piece.ends_with('\u{fffd}') {
            return Ok(String::new());
        }
        self.ids.drain(..self.num_done);
        self.num_done = self.ids.len();
        self.done = self.tokenizer.decode_with(&self.ids, self.skip_special)?;
        Ok(piece)
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
        self.rest()
    }

    fn rest(&self) -> Result<String> {
        let text = self.tokenizer.decode_with(&self.ids, self.skip_special)?;
        if text.len() <= self.done.len() {
            return Ok(String::new());
        }
        let rest = text.strip_prefix(&self.done);
        rest.map(String::from).context("cannot decode: an id changes the text of the ids before it")
    }
}
