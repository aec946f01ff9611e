//! Texts of any length in pieces that are tokenized one by one, from memory or from a file: the same text gives the same pieces.
//!
//! A piece ends after a line end that white space does not follow, and which white space does not precede if there is such a one.
//! No pre-tokenizer of the kind that GPT-2 and Llama 3 have puts anything together across it, so the ids are those of the whole text.
//! (Except that Llama 3's tokenizer cuts after 400,000 characters, wherever that is: those cuts are other ones, in texts of more. And a
//! tokenizer that puts a space before a text puts one before each piece.) Only a piece without such a line end is cut between any two
//! characters.

use std::fs::File;
use std::io::{self, Read, Take};
use std::path::Path;

/// Bytes of a piece at most. While it tokenizes, Hugging Face's library takes some hundred times as many bytes of memory.
pub(super) const PIECE: usize = 32 << 10;

/// Where the first piece of `text` ends, if `text` is longer than `limit`.
fn cut(text: &str, limit: usize) -> usize {
    let bytes = text.as_bytes();
    let limit = text.floor_char_boundary(limit);
    let is_space_at = |place: usize| text[place..].starts_with(char::is_whitespace);
    let mut after_space = None;
    for end in (2..=limit).rev().filter(|end| bytes[end - 1] == b'\n' && !is_space_at(*end)) {
        let before = text.floor_char_boundary(end - 2);
        if !is_space_at(before) {
            return end;
        }
        after_space = after_space.or(Some(end));
    }
    after_space.unwrap_or(limit)
}

/// The pieces of a text.
pub(super) fn of_text(text: &str) -> impl Iterator<Item = &str> {
    within(text, PIECE)
}

/// Pieces of at most `limit` bytes.
fn within(mut text: &str, limit: usize) -> impl Iterator<Item = &str> {
    std::iter::from_fn(move || {
        let end = if text.len() > limit { cut(text, limit) } else { text.len() };
        let (piece, rest) = text.split_at(end);
        text = rest;
        (!piece.is_empty()).then_some(piece)
    })
}

/// The pieces of the beginning of a file.
pub(super) struct FilePieces {
    file: Take<File>,
    /// Valid UTF-8, and then the beginning of a character.
    buffer: Vec<u8>,
    has_ended: bool,
}

impl FilePieces {
    pub(super) fn open(path: &Path, bytes: u64) -> io::Result<Self> {
        Ok(Self { file: File::open(path)?.take(bytes), buffer: vec![], has_ended: false })
    }

    /// The next piece; none at the end.
    pub(super) fn next(&mut self) -> io::Result<Option<String>> {
        // With the character that follows a piece.
        let wanted = PIECE + 4;
        while !self.has_ended && self.buffer.len() < wanted {
            let missing = (wanted - self.buffer.len()) as u64;
            self.has_ended = self.file.by_ref().take(missing).read_to_end(&mut self.buffer)? == 0;
        }
        let text = match std::str::from_utf8(&self.buffer) {
            Ok(text) => text,
            Err(error) if error.error_len().is_none() && !self.has_ended => {
                std::str::from_utf8(&self.buffer[..error.valid_up_to()]).unwrap_or_default()
            }
            Err(error) => return Err(io::Error::new(io::ErrorKind::InvalidData, error)),
        };
        let Some(piece) = of_text(text).next().map(String::from) else { return Ok(None) };
        self.buffer.drain(..piece.len());
        Ok(Some(piece))
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::{FilePieces, PIECE, of_text, within};
    use crate::{SpecialTokens, Tokenizer};

    fn from_file(text: &str) -> Vec<String> {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.write_all(text.as_bytes()).unwrap();
        let mut pieces = FilePieces::open(file.path(), text.len() as u64).unwrap();
        std::iter::from_fn(|| pieces.next().unwrap()).collect()
    }

    fn check(text: &str) -> Vec<String> {
        let pieces: Vec<String> = of_text(text).map(String::from).collect();
        assert_eq!(pieces.concat(), text);
        assert!(pieces.iter().all(|piece| !piece.is_empty() && piece.len() <= PIECE));
        assert!(pieces == from_file(text), "the file's pieces are others");
        pieces
    }

    #[test]
    fn ends_after_lines() {
        let pieces = check(&"a line of text, and \u{e9} \n\n  indented\nagain\n".repeat(80_000));
        assert!(pieces.len() > 2);
        for pair in pieces.windows(2) {
            let (piece, next) = (&pair[0], &pair[1]);
            assert!(piece.ends_with("indented\n") || piece.ends_with("again\n"));
            assert!(next.starts_with("again") || next.starts_with("a line"));
        }
    }

    #[test]
    fn prefers_any_line_end_to_none() {
        let pieces = check(&"word \nword ".repeat(200_000));
        assert!(pieces.iter().rev().skip(1).all(|piece| piece.ends_with(" \n")));
    }

    #[test]
    fn cuts_between_characters_without_lines() {
        for text in ["\u{1f600}".repeat(600_000), "x\u{e9}".repeat(800_000), "\n".repeat(3 << 20)] {
            assert!(check(&text).len() > 2);
        }
    }

    /// The ids of the pieces are those of the text.
    #[test]
    fn changes_no_id() {
        let file = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/vectors/tokenizer.json");
        let tokenizer = Tokenizer::from_file(file).unwrap();
        let ids = |text: &str| tokenizer.encode(text, SpecialTokens::AreText).unwrap();
        let text = "The quick brown fox, 123 times.\n\n    indented \u{e9}\r\n  \n\tand so on \nend\n".repeat(40);
        for limit in (100..200).step_by(9) {
            let pieces: Vec<&str> = within(&text, limit).collect();
            assert!(pieces.len() > 10);
            assert_eq!(pieces.into_iter().flat_map(ids).collect::<Vec<_>>(), ids(&text), "pieces of {limit} bytes");
        }
    }

    #[test]
    fn short_texts_are_one_piece() {
        assert_eq!(check("a\nb"), ["a\nb"]);
        assert!(check("").is_empty());
        assert_eq!(check(&"\u{e9}".repeat(PIECE / 2)).len(), 1);
        assert_eq!(check(&"\u{e9}".repeat(PIECE / 2 + 1)).len(), 2);
    }
}
