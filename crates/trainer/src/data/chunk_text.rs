//! Splits texts of any length, from memory or a file, into chunks that are tokenized one by one.
//! The same text always gives the same chunks, and together they have the ids of the whole text.
//!
//! A chunk ends where the tokenizer certainly ends a word, see [`Tokenizer::last_word_end`]. If there
//! is no such place, the chunk is longer, if necessary as long as the text.
//!
//! Llama 3's `tokenizer.model` also cuts after 400,000 characters at any place. In longer texts
//! those cuts differ.

use std::io::{self, Read};

use crate::Tokenizer;

/// Bytes of a chunk, unless there is no place to cut. Hugging Face's library takes about a hundred
/// times that memory while it tokenizes.
pub(super) const CHUNK: usize = 32 << 10;

/// First chunk of `text`, of at most `limit` bytes if possible. `None` if more of the text is
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
        if let Some(end) = tokenizer.last_word_end(text, within).filter(|end| *end > 0) {
            return Some(&text[..end]);
        }
        within += limit;
    }
}

/// Reader of the chunks of a text.
pub(super) struct Chunks<'a, R> {
    text: R,
    /// Bytes of a chunk, if possible.
    limit: usize,
    /// Valid UTF-8, except for an incomplete character at the end.
    buffer: Vec<u8>,
    has_ended: bool,
    tokenizer: &'a Tokenizer,
}

impl<'a, R: Read> Chunks<'a, R> {
    pub(super) fn new(text: R, limit: usize, tokenizer: &'a Tokenizer) -> Self {
        Self { text, limit, buffer: vec![], has_ended: false, tokenizer }
    }
}

impl<R: Read> Iterator for Chunks<'_, R> {
    type Item = io::Result<String>;

    fn next(&mut self) -> Option<io::Result<String>> {
        // A chunk, its lookahead, and the rest of a character.
        let mut wanted = self.limit + Tokenizer::LOOKAHEAD + 4;
        loop {
            while !self.has_ended && self.buffer.len() < wanted {
                let missing = (wanted - self.buffer.len()) as u64;
                match self.text.by_ref().take(missing).read_to_end(&mut self.buffer) {
                    Ok(read) => self.has_ended = read == 0,
                    Err(error) => return Some(Err(error)),
                }
            }
            let text = match std::str::from_utf8(&self.buffer) {
                Ok(text) => text,
                Err(error) if error.error_len().is_none() && !self.has_ended => {
                    std::str::from_utf8(&self.buffer[..error.valid_up_to()]).unwrap_or_default()
                }
                Err(error) => return Some(Err(io::Error::new(io::ErrorKind::InvalidData, error))),
            };
            if let Some(text) = first(text, self.limit, self.has_ended, self.tokenizer) {
                let chunk = Some(text.to_string()).filter(|text| !text.is_empty());
                self.buffer.drain(..text.len());
                return chunk.map(Ok);
            }
            wanted *= 2;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::{CHUNK, Chunks};
    use crate::rng::Rng;
    use crate::{SpecialTokens, Tokenizer};

    fn chunks(text: &str, limit: usize, tokenizer: &Tokenizer) -> Vec<String> {
        let chunks: Vec<_> = Chunks::new(text.as_bytes(), limit, tokenizer).map(Result::unwrap).collect();
        assert_eq!(chunks.concat(), text);
        assert!(chunks.iter().all(|chunk| !chunk.is_empty()));
        chunks
    }

    fn of_bytes(text: &str) -> Vec<String> {
        let chunks = chunks(text, CHUNK, &Tokenizer::bytes());
        assert!(chunks.iter().all(|chunk| chunk.len() <= CHUNK));
        chunks
    }

    const VECTORS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/vectors/tokenizer.json");

    /// Chunks of about `limit` bytes, whose ids are the ids of the text.
    fn with_the_same_ids(text: &str, limit: usize, tokenizer: &Tokenizer) -> Vec<String> {
        let ids = |text: &str| tokenizer.encode(text, SpecialTokens::AreText).unwrap();
        let chunks = chunks(text, limit, tokenizer);
        assert!(chunks.iter().flat_map(|chunk| ids(chunk)).eq(ids(text)), "chunks of {limit} bytes");
        chunks
    }

    /// Random text; with `lines`, it has line ends.
    fn mixture(seed: u64, len: usize, lines: bool) -> String {
        let mut rng = Rng::new(seed);
        let words =
            ["the", " fox", " it's", "12345", " 7", ", ", "...", "中文", "，", "  ", "\t", "e\u{301}", " \u{1f600}"];
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
    fn texts_without_lines() {
        for text in ["\u{1f600}".repeat(600_000), "x\u{e9}".repeat(800_000), "\n".repeat(3 << 20)] {
            assert!(of_bytes(&text).len() > 2);
        }
        for (text, count) in
            [("", 0), ("a\nb", 1), (&*"\u{e9}".repeat(CHUNK / 2), 1), (&"\u{e9}".repeat(CHUNK / 2 + 1), 2)]
        {
            assert_eq!(of_bytes(text).len(), count);
        }
        // A long line is cut between words. A word of any length stays whole.
        let tokenizer = Tokenizer::from_file(VECTORS).unwrap();
        let len = chunks(&mixture(3, 5 * CHUNK, false), CHUNK, &tokenizer).len();
        assert!((5..8).contains(&len), "{len}");
        assert_eq!(chunks(&"x".repeat(3 * CHUNK), CHUNK, &tokenizer).len(), 1);
    }

    #[test]
    fn changes_no_id() {
        let tokenizer = Tokenizer::from_file(VECTORS).unwrap();
        let lines = "The quick brown fox, 123 times.\n\n    indented \u{e9}\r\n  \n\tand so on \nend\n".repeat(40);
        let texts = [lines, mixture(1, 20_000, true), mixture(2, 20_000, false)];
        for (text, limit) in texts.iter().flat_map(|text| (600..2000).step_by(190).map(move |limit| (text, limit))) {
            let count = with_the_same_ids(text, limit, &tokenizer).len();
            assert!(count > 1 && count * limit * 2 > text.len(), "{count} chunks of {limit} bytes");
        }
        // Digits are grouped in threes from the beginning of their run, which a window does not show.
        for text in ["9".repeat(5000), " ".repeat(5000), format!("{} x", "12 ".repeat(3000))] {
            with_the_same_ids(&text, 700, &tokenizer);
        }
    }

    /// Pre-tokenizers that count characters or words from the beginning of the text have no certain
    /// word ends.
    #[test]
    fn words_that_are_counted_are_not_cut() {
        let mut file: serde_json::Value = serde_json::from_str(&std::fs::read_to_string(VECTORS).unwrap()).unwrap();
        let split = |regex: &str| serde_json::json!({ "type": "Split", "pattern": { "Regex": regex }, "behavior": "Isolated", "invert": false });
        let text = mixture(4, 20_000, true);
        for pre_tokenizer in
            &[split("(?s:.{5})"), split(r"\S+ \S+"), serde_json::json!({ "type": "FixedLength", "length": 7 })]
        {
            file["pre_tokenizer"] = serde_json::json!({ "type": "Sequence", "pretokenizers": [pre_tokenizer,
                { "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false }] });
            let mut written = tempfile::Builder::new().suffix(".json").tempfile().unwrap();
            written.write_all(file.to_string().as_bytes()).unwrap();
            with_the_same_ids(&text, 700, &Tokenizer::from_file(written.path()).unwrap());
        }
    }
}
