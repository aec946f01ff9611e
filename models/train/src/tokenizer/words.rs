//! Where a text can be cut so that its parts have the ids of the whole: where the tokenizer certainly ends a word.

use super::hugging_face::HuggingFace;
use super::{Kind, SpecialTokens, Tokenizer};

/// Bytes before and after a place that decide whether a word ends there.
const CONTEXT: usize = 512;
/// Places that are tried before a text is said to have none.
const MAX_TRIES: usize = 32;

/// Kinds of characters that every pre-tokenizer tells apart.
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

    /// Whether the ids of `text` are those of its two parts, after a line end that a character other than white space follows.
    pub(crate) fn ends_word(&self, text: &str, place: usize) -> bool {
        match &self.kind {
            Kind::Bytes => true,
            // No word of its expression goes on after such a line end.
            Kind::Tiktoken(_) => true,
            Kind::HuggingFace(tokenizer) => {
                let (around, place) = around(text, place);
                Words::of(tokenizer, around).is_some_and(|words| words.end_at(tokenizer, around, place))
            }
        }
    }

    /// The last place up to `limit`, and not far from it, at which the ids of `text` are those of its two parts.
    pub(crate) fn last_word_end(&self, text: &str, limit: usize) -> Option<usize> {
        let limit = text.floor_char_boundary(limit);
        match &self.kind {
            Kind::Bytes => Some(limit),
            // In its expression only a word of letters begins with a space that letters follow. Elsewhere the limits of the
            // original for characters in a row would be others.
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
                // In the middle of like characters, a row of them decides, which may have begun long before.
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

/// The text around a place, and where the place is in it.
fn around(text: &str, place: usize) -> (&str, usize) {
    let begin = text.floor_char_boundary(place.saturating_sub(CONTEXT));
    let end = text.floor_char_boundary((place + CONTEXT).min(text.len()));
    (&text[begin..end], place - begin)
}

/// A short text in ids and words.
struct Words {
    ids: Vec<u32>,
    /// Where words end that others follow.
    ends: Vec<usize>,
}

impl Words {
    fn of(tokenizer: &HuggingFace, text: &str) -> Option<Self> {
        let (ids, ends) = tokenizer.words(text).ok()?;
        Some(Self { ids, ends })
    }

    /// Whether a word ends at `place`, and both parts of the text have the ids that they have in the whole.
    fn end_at(&self, tokenizer: &HuggingFace, text: &str, place: usize) -> bool {
        let ids = |text| tokenizer.encode(text, SpecialTokens::AreText).unwrap_or_default();
        self.ends.contains(&place)
            && [ids(&text[..place]), ids(&text[place..])].concat() == self.ids
            && Self::end_wherever_text_begins(tokenizer, text, place)
    }

    /// Whether a word ends at `place` also without the first character before it, and without the first word: else words are counted from
    /// the beginning of the text, as those of so many characters are, or of two words each.
    fn end_wherever_text_begins(tokenizer: &HuggingFace, text: &str, place: usize) -> bool {
        let first = |text: &str| text.chars().next().map_or(0, char::len_utf8);
        let word = text.find(char::is_whitespace).map_or(0, |space| space + first(&text[space..]));
        let mut begins = [first(text), word].into_iter().filter(|begin| (1..place).contains(begin));
        let words = |begin: usize| Self::of(tokenizer, &text[begin..]);
        begins.all(|begin| words(begin).is_some_and(|words| words.ends.contains(&(place - begin))))
    }
}
