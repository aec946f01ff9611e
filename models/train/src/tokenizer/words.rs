//! Finds where a text can be cut so that its parts have the ids of the whole: where the tokenizer
//! certainly ends a word.

use super::hugging_face::HuggingFace;
use super::{Kind, SpecialTokens, Tokenizer};

/// Bytes before and after a place that decide whether a word ends there.
const CONTEXT: usize = 512;
/// Maximum number of places that are tried.
const MAX_TRIES: usize = 32;

/// Character classes that every pre-tokenizer distinguishes.
#[derive(PartialEq, Eq)]
enum Class {
    Space,
    Letter,
    Digit,
    Other,
}

impl Class {
    fn of(c: char) -> Self {
        match c {
            c if c.is_whitespace() => Self::Space,
            c if c.is_numeric() => Self::Digit,
            c if c.is_alphabetic() => Self::Letter,
            _ => Self::Other,
        }
    }
}

impl Tokenizer {
    /// Bytes after a place that decide whether a word ends there.
    pub(crate) const LOOKAHEAD: usize = CONTEXT + 4;

    /// Whether cutting `text` at `place` keeps its ids. `place` must follow a line end and precede
    /// a character other than white space.
    pub(crate) fn ends_word(&self, text: &str, place: usize) -> bool {
        match &self.kind {
            Kind::Bytes => true,
            // No word of its expression continues after this line end.
            Kind::Tiktoken(_) => true,
            Kind::HuggingFace(tokenizer) => {
                let (around, place) = around(text, place);
                Words::of(tokenizer, around).is_some_and(|words| words.end_at(tokenizer, around, place))
            }
        }
    }

    /// Last place up to `limit`, and close to it, at which cutting `text` keeps its ids.
    pub(crate) fn last_word_end(&self, text: &str, limit: usize) -> Option<usize> {
        let limit = text.floor_char_boundary(limit);
        match &self.kind {
            Kind::Bytes => Some(limit),
            // In its expression only a word of letters begins with a space before a letter. At
            // other places, the original's limits for characters in a row would differ.
            Kind::Tiktoken(_) => {
                let begin = text.floor_char_boundary(limit.saturating_sub(CONTEXT));
                let is_end = |place: &usize| {
                    let (before, after) = (text[..*place].chars().next_back(), &text.as_bytes()[*place..]);
                    before.is_some_and(|c| !c.is_whitespace())
                        && matches!(after, [b' ', letter, ..] if letter.is_ascii_alphabetic())
                };
                (begin.max(1)..=limit).rev().filter(|place| text.is_char_boundary(*place)).find(is_end)
            }
            Kind::HuggingFace(tokenizer) => {
                let (around, end) = around(text, limit);
                let begin = limit - end;
                let words = Words::of(tokenizer, around)?;
                // Inside a run of one class the whole run decides, and it may have begun long
                // before.
                let is_edge = |place: &usize| {
                    let (before, after) = around.split_at(*place);
                    let classes = (before.chars().next_back().map(Class::of), after.chars().next().map(Class::of));
                    classes.0.is_some() && classes.0 != classes.1
                };
                let places = words.ends.iter().copied().rev().filter(|place| (CONTEXT / 2..=end).contains(place));
                let mut places = places.filter(|place| around.is_char_boundary(*place)).filter(is_edge).take(MAX_TRIES);
                places.find(|place| words.end_at(tokenizer, around, *place)).map(|place| begin + place)
            }
        }
    }
}

/// Text around a place, and the place in it.
fn around(text: &str, place: usize) -> (&str, usize) {
    let begin = text.floor_char_boundary(place.saturating_sub(CONTEXT));
    let end = text.floor_char_boundary((place + CONTEXT).min(text.len()));
    (&text[begin..end], place - begin)
}

/// Ids and words of a short text.
struct Words {
    ids: Vec<u32>,
    /// Word ends that are followed by another word.
    ends: Vec<usize>,
}

impl Words {
    fn of(tokenizer: &HuggingFace, text: &str) -> Option<Self> {
        let (ids, ends) = tokenizer.words(text).ok()?;
        Some(Self { ids, ends })
    }

    /// Whether a word ends at `place`, and both parts have the ids that they have in the whole
    /// text.
    fn end_at(&self, tokenizer: &HuggingFace, text: &str, place: usize) -> bool {
        let ids = |text| tokenizer.encode(text, SpecialTokens::AreText).unwrap_or_default();
        self.ends.contains(&place)
            && [ids(&text[..place]), ids(&text[place..])].concat() == self.ids
            && Self::end_wherever_text_begins(tokenizer, text, place)
    }

    /// Whether a word ends at `place` even without the first character of the text, and without its
    /// first word. Otherwise words are counted from the beginning, for example in fixed numbers of
    /// characters or in pairs.
    fn end_wherever_text_begins(tokenizer: &HuggingFace, text: &str, place: usize) -> bool {
        let first = |text: &str| text.chars().next().map_or(0, char::len_utf8);
        let word = text.find(char::is_whitespace).map_or(0, |space| space + first(&text[space..]));
        let mut begins = [first(text), word].into_iter().filter(|begin| (1..place).contains(begin));
        let words = |begin: usize| Self::of(tokenizer, &text[begin..]);
        begins.all(|begin| words(begin).is_some_and(|words| words.ends.contains(&(place - begin))))
    }
}
