//! Splits texts of any length, from memory or a file, into pieces that are tokenized one by one.
//! The same text always gives the same pieces, and together they have the ids of the whole text.
//!
//! A piece ends after a line end that is not followed by white space. Line ends that are not
//! preceded by white space either are preferred. Without any, the piece ends where the tokenizer
//! certainly ends a word, see [`Tokenizer::last_word_end`]. If there is no such place, the piece is
//! longer, if necessary as long as the text.
//!
//! Llama 3's `tokenizer.model` also cuts after 400,000 characters at any place. In longer texts
//! those cuts differ.

use std::fs::File;
use std::io::{self, Read, Take};
use std::path::Path;

use crate::{Tokenizer, files};

/// Bytes of a piece, unless there is no place to cut. Hugging Face's library takes about a hundred
/// times that memory while it tokenizes.
pub(super) const PIECE: usize = 32 << 10;

/// Place after the last suitable line end within `limit`. Line ends that do not follow white space
/// are preferred.
fn line_end(text: &str, limit: usize) -> Option<usize> {
    let bytes = text.as_bytes();
    let limit = text.floor_char_boundary(limit);
    let is_space_at = |place: usize| text[place..].starts_with(char::is_whitespace);
    let mut after_space = None;
    for end in (2..=limit).rev().filter(|end| bytes[end - 1] == b'\n' && !is_space_at(*end)) {
        let before = text.floor_char_boundary(end - 2);
        if !is_space_at(before) {
            return Some(end);
        }
        after_space = after_space.or(Some(end));
    }
    after_space
}

/// First piece of `text`, of at most `limit` bytes if possible. `None` if more of the text is
/// needed to decide. With `is_whole`, nothing follows `text`.
fn first<'a>(text: &'a str, limit: usize, is_whole: bool, tokenizer: &Tokenizer) -> Option<&'a str> {
    let mut within = limit;
    loop {
        if text.len() <= within {
            return is_whole.then_some(text);
        }
        if !is_whole && text.len() < within + Tokenizer::LOOKAHEAD {
            return None;
        }
        if within == limit
            && let Some(end) = line_end(text, limit).filter(|end| tokenizer.ends_word(text, *end))
        {
            return Some(&text[..end]);
        }
        if let Some(end) = tokenizer.last_word_end(text, within).filter(|end| *end > 0) {
            return Some(&text[..end]);
        }
        within += limit;
    }
}

/// Pieces of a text.
pub(super) fn of_text<'a>(text: &'a str, tokenizer: &'a Tokenizer) -> impl Iterator<Item = &'a str> {
    within(text, PIECE, tokenizer)
}

/// Pieces of about `limit` bytes.
fn within<'a>(mut text: &'a str, limit: usize, tokenizer: &'a Tokenizer) -> impl Iterator<Item = &'a str> {
    std::iter::from_fn(move || {
        let piece = first(text, limit, true, tokenizer)?;
        text = &text[piece.len()..];
        (!piece.is_empty()).then_some(piece)
    })
}

/// Reader of pieces from the beginning of a file.
pub(super) struct FilePieces<'a> {
    file: Take<File>,
    /// Valid UTF-8, except for an incomplete character at the end.
    buffer: Vec<u8>,
    has_ended: bool,
    tokenizer: &'a Tokenizer,
}

impl<'a> FilePieces<'a> {
    pub(super) fn open(path: &Path, bytes: u64, tokenizer: &'a Tokenizer) -> io::Result<Self> {
        Ok(Self { file: files::open(path)?.take(bytes), buffer: vec![], has_ended: false, tokenizer })
    }

    /// Next piece; `None` at the end.
    pub(super) fn next(&mut self) -> io::Result<Option<String>> {
        // A piece, its lookahead, and the rest of a character.
        let mut wanted = PIECE + Tokenizer::LOOKAHEAD + 4;
        loop {
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
            if let Some(text) = first(text, PIECE, self.has_ended, self.tokenizer) {
                let piece = Some(text.to_string()).filter(|text| !text.is_empty());
                self.buffer.drain(..text.len());
                return Ok(piece);
            }
            wanted *= 2;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::{FilePieces, PIECE, of_text, within};
    use crate::rng::Rng;
    use crate::{SpecialTokens, Tokenizer};

    fn from_file(text: &str, tokenizer: &Tokenizer) -> Vec<String> {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.write_all(text.as_bytes()).unwrap();
        let mut pieces = FilePieces::open(file.path(), text.len() as u64, tokenizer).unwrap();
        std::iter::from_fn(|| pieces.next().unwrap()).collect()
    }

    fn check(text: &str) -> Vec<String> {
        let pieces = check_with(text, &Tokenizer::bytes());
        assert!(pieces.iter().all(|piece| piece.len() <= PIECE));
        pieces
    }

    fn check_with(text: &str, tokenizer: &Tokenizer) -> Vec<String> {
        let pieces: Vec<_> = of_text(text, tokenizer).map(String::from).collect();
        assert!(pieces == from_file(text, tokenizer), "the file's pieces are others");
        assert_eq!(pieces.concat(), text);
        assert!(pieces.iter().all(|piece| !piece.is_empty()));
        pieces
    }

    fn byte_pairs() -> Tokenizer {
        Tokenizer::from_file(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/vectors/tokenizer.json")).unwrap()
    }

    /// Random text; with `lines`, it has line ends.
    fn mixture(seed: u64, len: usize, lines: bool) -> String {
        let mut rng = Rng::new(seed);
        let words = [
            "the",
            " fox",
            " it's",
            "12345",
            " 7",
            ", ",
            "...",
            "\u{4e2d}\u{6587}",
            "\u{ff0c}",
            "  ",
            "\t",
            "\u{e9}\u{301}",
            " \u{1f600}",
        ];
        let mut text = String::new();
        while text.len() < len {
            match rng.below(60) {
                0 if lines => text += ["\n", "\r\n", "\n\n", " \n "][rng.below(4)],
                1 => text += &" ".repeat(rng.below(40)),
                2 => text += &"9".repeat(rng.below(40)),
                _ => text += words[rng.below(words.len())],
            }
        }
        text
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

    /// The ids of the pieces are the ids of the text, for any text.
    #[test]
    fn changes_no_id() {
        let tokenizer = byte_pairs();
        let ids = |text: &str| tokenizer.encode(text, SpecialTokens::AreText).unwrap();
        let lines = "The quick brown fox, 123 times.\n\n    indented \u{e9}\r\n  \n\tand so on \nend\n".repeat(40);
        let texts = [lines, mixture(1, 20_000, true), mixture(2, 20_000, false)];
        for (text, limit) in texts.iter().flat_map(|text| (600..2000).step_by(190).map(move |limit| (text, limit))) {
            let pieces: Vec<&str> = within(text, limit, &tokenizer).collect();
            assert!(
                pieces.len() * limit * 2 > text.len() && pieces.len() > 1,
                "{} pieces of {limit} bytes",
                pieces.len()
            );
            assert!(pieces.into_iter().flat_map(ids).eq(ids(text)), "pieces of {limit} bytes");
        }
    }

    /// A long line is cut between words, from a file as in memory. A word of any length stays
    /// whole.
    #[test]
    fn lines_of_any_length() {
        let tokenizer = byte_pairs();
        let line = mixture(3, 5 * PIECE, false);
        let pieces = check_with(&line, &tokenizer);
        assert!((5..8).contains(&pieces.len()), "{}", pieces.len());
        let word = "x".repeat(3 * PIECE);
        assert_eq!(check_with(&word, &tokenizer), [word]);
    }

    /// Digits are grouped in threes from the beginning of their run, which a window does not show.
    #[test]
    fn rows_of_like_characters_are_not_cut() {
        let tokenizer = byte_pairs();
        for text in ["9".repeat(5000), " ".repeat(5000), format!("{} x", "12 ".repeat(3000))] {
            let ids = |text: &str| tokenizer.encode(text, SpecialTokens::AreText).unwrap();
            let pieces = within(&text, 700, &tokenizer).flat_map(ids).collect::<Vec<_>>();
            assert_eq!(pieces, ids(&text));
        }
    }

    /// Pre-tokenizers that count characters or words from the beginning of the text have no certain
    /// word ends.
    #[test]
    fn words_that_are_counted_are_not_cut() {
        let vectors = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/vectors/tokenizer.json");
        let mut file: serde_json::Value = serde_json::from_str(&std::fs::read_to_string(vectors).unwrap()).unwrap();
        let split = |regex: &str| serde_json::json!({ "type": "Split", "pattern": { "Regex": regex }, "behavior": "Isolated", "invert": false });
        let text = mixture(4, 20_000, true);
        for pre_tokenizer in
            &[split("(?s:.{5})"), split(r"\S+ \S+"), serde_json::json!({ "type": "FixedLength", "length": 7 })]
        {
            file["pre_tokenizer"] = serde_json::json!({ "type": "Sequence", "pretokenizers": [pre_tokenizer,
                { "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false }] });
            let mut written = tempfile::Builder::new().suffix(".json").tempfile().unwrap();
            written.write_all(file.to_string().as_bytes()).unwrap();
            let tokenizer = Tokenizer::from_file(written.path()).unwrap();
            let ids = |text: &str| tokenizer.encode(text, SpecialTokens::AreText).unwrap();
            let pieces = within(&text, 700, &tokenizer).flat_map(ids).collect::<Vec<_>>();
            assert_eq!(pieces, ids(&text), "{pre_tokenizer}");
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
