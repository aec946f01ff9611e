//! Finds where a text can be cut so that its parts have the ids of the whole: where the tokenizer
//! certainly ends a word.

use super::hugging_face::HuggingFace;
use super::{Kind, SpecialTokens, Tokenizer};

/// Bytes before and after a place that decide whether a word ends there.
const CONTEXT: usize = 512;
/// Maximum number of places that are tried.
const MAX_TRIES: usize = 32;

impl Tokenizer {
    /// Bytes after a place that decide whether a word ends there.
    pub(crate) const LOOKAHEAD: usize = CONTEXT + 4;

    /// Last place up to `limit` at which cutting `text` keeps its ids. Hugging Face's tokenizers are
    /// only asked close to `limit`.
    pub(crate) fn last_word_end(&self, text: &str, limit: usize) -> Option<usize> {
        let limit = text.floor_char_boundary(limit);
        match &self.kind {
            Kind::Bytes => Some(limit),
            // In its expression no word continues after a line end with a character other than white
            // space, and only a word of letters begins with a space before a letter. At other
            // places, the original's limits for characters in a row would differ.
            Kind::Tiktoken(_) => {
                let is_end = |place: &usize| {
                    let (before, after) = (text[..*place].chars().next_back(), &text[*place..]);
                    let is_word = after.starts_with(' ') && after[1..].starts_with(|c: char| c.is_ascii_alphabetic());
                    match before {
                        Some('\n') => !after.starts_with(char::is_whitespace),
                        before => is_word && before.is_some_and(|c| !c.is_whitespace()),
                    }
                };
                (1..=limit).rev().filter(|place| text.is_char_boundary(*place)).find(is_end)
            }
            Kind::HuggingFace(tokenizer) => {
                let (around, end) = around(text, limit);
                // Inside a run of one class the whole run decides, and it may have begun long
                // before.
                let is_edge = |place: &usize| {
                    let (before, after) = around.split_at(*place);
                    before.chars().next_back().map(class) != after.chars().next().map(class)
                };
                let (_, ends) = tokenizer.words(around).ok()?;
                let ends = ends.into_iter().rev().filter(|place| (CONTEXT / 2..=end).contains(place));
                let mut ends = ends.filter(|place| around.is_char_boundary(*place)).filter(is_edge).take(MAX_TRIES);
                ends.find(|place| keeps_ids(tokenizer, around, *place)).map(|place| limit - end + place)
            }
        }
    }
}

/// Character class that every pre-tokenizer distinguishes.
fn class(c: char) -> u8 {
    match c {
        c if c.is_whitespace() => 0,
        c if c.is_numeric() => 1,
        c if c.is_alphabetic() => 2,
        _ => 3,
    }
}

/// Text around a place, and the place in it.
fn around(text: &str, place: usize) -> (&str, usize) {
    let begin = text.floor_char_boundary(place.saturating_sub(CONTEXT));
    let end = text.floor_char_boundary((place + CONTEXT).min(text.len()));
    (&text[begin..end], place - begin)
}

/// Whether a word ends at `place`, and both parts have the ids that they have in the whole text.
///
/// The word must end there even without the first character of the text, and without its first
/// word. Otherwise words are counted from the beginning, for example in fixed numbers of characters
/// or in pairs.
fn keeps_ids(tokenizer: &HuggingFace, text: &str, place: usize) -> bool {
    let first = |text: &str| text.chars().next().map_or(0, char::len_utf8);
    let word = text.find(char::is_whitespace).map_or(0, |space| space + first(&text[space..]));
    let ids = |text| tokenizer.encode(text, SpecialTokens::AreText).unwrap_or_default();
    [0, first(text), word].into_iter().filter(|begin| *begin == 0 || *begin < place).all(|begin| {
        let words = tokenizer.words(&text[begin..]);
        words.is_ok_and(|(whole, ends)| {
            let has_ids = begin > 0 || [ids(&text[..place]), ids(&text[place..])].concat() == whole;
            ends.contains(&(place - begin)) && has_ids
        })
    })
}
