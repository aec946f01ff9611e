//! Marks: characters inserted into a text to find positions in it again.

use std::ops::Range;

/// Characters that mark a beginning and an end.
pub(super) type Marks = [char; 2];

/// Noncharacters of Unicode, which texts do not contain.
const NO_TEXT: std::ops::RangeInclusive<char> = '\u{fdd0}'..='\u{fdef}';

/// Two characters that the text does not contain.
pub(super) fn unused(text: &str) -> Option<Marks> {
    let mut unused = NO_TEXT.filter(|mark| !text.contains(*mark));
    Some([unused.next()?, unused.next()?])
}

/// Puts marks around the text, inside the white space that templates strip.
pub(super) fn around(text: &str, [start, end]: Marks) -> String {
    let core = text.trim();
    if core.is_empty() {
        return format!("{start}{end}{text}");
    }
    let before = text.len() - text.trim_start().len();
    format!("{}{start}{core}{end}{}", &text[..before], &text[before + core.len()..])
}

/// Text without marks, and the outermost ranges between marks. `None` if a mark has no partner.
pub(super) fn spans(marked: &str, [start, end]: Marks) -> Option<(String, Vec<Range<usize>>)> {
    let (mut plain, mut spans, mut open) = (String::new(), vec![], vec![]);
    for c in marked.chars() {
        if c == start {
            open.push(plain.len());
        } else if c == end {
            let start = open.pop()?;
            spans.extend(open.is_empty().then_some(start..plain.len()));
        } else {
            plain.push(c);
        }
    }
    open.is_empty().then_some((plain, spans))
}

/// Text with the positions of its marks.
pub(super) struct Marked {
    pub(super) text: String,
    /// `None` if the template dropped this mark.
    pub(super) start: Option<usize>,
    pub(super) end: usize,
}

impl Marked {
    /// Reads a text with one end mark and at most one begin mark before it. `None` for other texts.
    pub(super) fn read(marked: &str, [start, end]: Marks) -> Option<Self> {
        let (before, after) = marked.split_once(end)?;
        if after.contains([start, end]) {
            return None;
        }
        let (first, last) = before.split_once(start).unwrap_or(("", before));
        if last.contains(start) {
            return None;
        }
        let start = before.contains(start).then_some(first.len());
        Some(Self { text: format!("{first}{last}{after}"), start, end: first.len() + last.len() })
    }
}
